"""Implements AdamW over float32 masters, with its states beside the masters, in 8 bits, or in host memory."""
