"""Reads `RUN/events`: what `penstock view`, `watch`, `report`, `trace` and `samples` show."""
