"""The proof that asynchronous training learns: see `experiment`."""

from benchmarks.learning.experiment import run

__all__ = ["run"]
