"""Runs that crash, in virtual time: what tests of the journal and `python -m benchmarks journal` play and audit."""
