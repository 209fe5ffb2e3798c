"""Writes a run as a trace for Perfetto: `RUN/trace.pftrace`."""
