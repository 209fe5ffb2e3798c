"""Serves the web page of a run: a server that reads run folders, and the page itself.

    RUN/events/* ─► RunReading (columns in memory, texts on disk) ─► GET /api/… ─► page (plain ES modules)

The server is a process of its own and only reads. `penstock view` starts it by hand; a run starts it when the
address that it printed is first opened.
"""
