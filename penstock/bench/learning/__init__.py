"""The proof that asynchronous training learns: see `experiment`."""

from penstock.bench.learning.experiment import run

__all__ = ["run"]
