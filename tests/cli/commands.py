"""The command line without a process of its own."""

import pytest

from penstock.cli.main import main


def call(*words: str) -> int:
    """The exit code of `penstock WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)
