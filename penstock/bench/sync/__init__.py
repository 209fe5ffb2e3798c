"""Measures what a weight update costs a working engine; `comparison` runs everything."""
