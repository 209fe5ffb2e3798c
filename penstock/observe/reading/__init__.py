"""Reads `RUN/events`, for `penstock view`, `report`, `trace` and `samples`."""
