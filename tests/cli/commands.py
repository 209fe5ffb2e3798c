"""The command line: in this process, and in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main


def call(*words: str) -> int:
    """The exit code of `penstock WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def start_command(folder: Path, *words: str, before: str = "") -> subprocess.Popen[str]:
    """`penstock WORDS` in a process of its own that runs in this folder, and `before` first; it writes all that it
    says to one pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{before}\nfrom penstock.cli import main; main()", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}"},
    )
