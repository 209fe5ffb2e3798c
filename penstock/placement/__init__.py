"""Chooses what `auto` means (GPUs, memory, threads), and refuses what a config can't have."""
