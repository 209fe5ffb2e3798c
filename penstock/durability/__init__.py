"""Keeps what must outlive a crash: the journal, checkpoints, and how a run recovers from them."""
