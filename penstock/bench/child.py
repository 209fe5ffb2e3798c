"""Runs a child process of a bench, which answers each line of input with a line of JSON and ends with its input."""

import json
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ANSWER_S = 180.0
"""How long a process may take to answer, its start included."""
END_S = 60.0


class ChildDied(Exception):
    """A process ended, or hangs."""


class Child:
    """Runs `python -m module words …` in a session of its own. Errors call it by its `role`."""

    def __init__(
        self, role: str, module: str, words: list[str], environ: Mapping[str, str] | None = None
    ) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )

    def tell(self, line: bytes) -> None:
        """Send a line. A dead process raises no error here; reading its answer will."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            self._process.kill()
            raise ChildDied(f"the {self.role} process did not answer within {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise ChildDied(f"the {self.role} process ended with code {self._process.wait(timeout=END_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, line: bytes) -> dict[str, Any]:
        self.tell(line)
        return self.read()

    def close(self) -> None:
        """Close the input, and kill the process if it does not end by itself. Idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it may have ended already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
