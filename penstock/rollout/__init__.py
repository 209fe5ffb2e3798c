"""Runs workflows: episodes in groups, and the turns and calls that are kept of them."""
