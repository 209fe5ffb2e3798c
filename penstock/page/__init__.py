"""The web page of a run: a server that reads run folders, and the page that it serves.

    RUN/events/* ─► RunReading (columns in memory, texts on disk) ─► GET /api/… ─► page (plain ES modules)

It is a process of its own and only reads. `penstock view` starts it by hand; a run starts it when somebody first
opens the address that it printed.
"""
