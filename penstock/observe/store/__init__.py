"""A run's events on disk: `RUN/events`."""
