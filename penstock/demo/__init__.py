"""Holds the demo: its task, its tiny model and how that is made, and a simulated latency."""
