"""Scores episodes between rollout and buffer. A scorer that fails costs its group, not the run."""
