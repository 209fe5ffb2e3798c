"""Kills and freezes processes of the demo at random, and audits what comes out (`penstock chaos`)."""
