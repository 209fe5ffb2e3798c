"""A worker process: `python -m penstock.worker --connect ADDRESS`. What it is, its first message says."""
