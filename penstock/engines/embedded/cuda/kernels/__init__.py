"""Holds the engine's Triton kernels. Importable only where triton is installed: see
`penstock.models.compilation`."""
