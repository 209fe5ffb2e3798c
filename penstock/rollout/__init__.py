"""Runs workflows in groups of episodes, and keeps their turns and calls for a restart."""
