"""Runs worker processes (`python -m penstock.worker`), which become what their first message says."""
