"""Simulates what a run would do on a cluster that is not there: the real controller in virtual time, against
simulated workers."""
