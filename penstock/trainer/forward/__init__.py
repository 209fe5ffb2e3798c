"""Runs the packed forward pass: rows of sequences in, logprobs, entropies and values of their loss tokens out."""
