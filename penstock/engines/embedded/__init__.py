"""Serves any Hugging Face causal LM with continuous batching over a paged cache."""
