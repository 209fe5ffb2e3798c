"""A trainer's checkpoint: taken beside steps, copied to host memory, written to files and read again."""
