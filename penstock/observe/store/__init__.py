"""Stores a run's events on disk: `RUN/events`."""
