"""Triton kernels of the engine. Importable only where triton is installed: see `penstock.models.compilation`."""
