"""The command line: `penstock train | init | generate | bench | list`."""

from penstock.cli.main import main

__all__ = ["main"]
