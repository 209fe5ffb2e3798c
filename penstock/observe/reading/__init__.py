"""Reads `RUN/events`: what `penstock view`, `report`, `trace` and `samples` show."""
