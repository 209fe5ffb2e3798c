"""What `auto` chooses: GPUs, memory, threads, and what a config can't have."""
