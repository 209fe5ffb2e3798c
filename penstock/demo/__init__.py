"""The demo, all in one room: its task, its tiny model and how that is made, and a simulated latency."""
