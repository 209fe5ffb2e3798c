"""Takes a trainer's checkpoints beside its steps: copies to host memory, writes files and reads them again."""
