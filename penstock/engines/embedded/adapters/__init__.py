"""Serves LoRA adapters in the embedded engine: beside the weights for several policies at once, or merged into
them."""
