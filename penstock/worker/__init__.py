"""Runs worker processes: `python -m penstock.worker --connect ADDRESS`. The first message says what a worker
becomes."""
