"""Launchers place worker processes; the channel to them is the same wherever they run."""
