import subprocess
import sys

import pytest

from penstock.channel.token_pipe import token_pipe

pytestmark = pytest.mark.processes

TAKES = """
import subprocess, sys
from penstock.channel.token_pipe import take_token
print(take_token(), flush=True)
print(repr(sys.stdin.read()), flush=True)
subprocess.run([sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"], check=True)
"""


def test_a_token_is_read_once_and_what_the_process_starts_finds_nothing() -> None:
    with token_pipe("the token") as stdin:
        told = subprocess.run([sys.executable, "-c", TAKES], stdin=stdin, capture_output=True, check=True)
    assert told.stdout.decode().splitlines() == ["the token", "''", "''"]
