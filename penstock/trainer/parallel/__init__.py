"""Trains one model on several ranks: how ranks are laid out, and one file for each kind of parallelism."""
