"""What an update of the weights costs an engine at work: see `comparison`."""

from penstock.bench.sync.comparison import run

__all__ = ["run"]
