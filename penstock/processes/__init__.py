"""Launches worker processes, supervises them and restarts them."""
