"""Runs the embedded engine on a GPU: a paged decode kernel, a fused sampler, and decoding as CUDA graphs."""
