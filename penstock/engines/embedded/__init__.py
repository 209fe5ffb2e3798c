"""The embedded engine: any Hugging Face causal LM with continuous batching over a paged cache."""

from penstock.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
