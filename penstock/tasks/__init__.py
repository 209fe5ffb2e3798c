"""Loads tasks, and gives a run an endless stream of them."""
