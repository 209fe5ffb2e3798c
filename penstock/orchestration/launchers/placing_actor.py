"""What Ray runs on a node: start a node agent, and say how it ended. It travels by value and uses the
standard library alone, so that a node without Penstock can say so."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass

NUM_LAST_LINES = 10
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class AgentEnd:
    host: str
    code: int
    last_lines: str


class PlacingActor:
    """One for each worker. Its end is its agent's, and its agent's end is its worker's."""

    def run(self, arguments: list[str], token: str) -> AgentEnd:
        """Start the agent and wait for its end."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        reading, writing = os.pipe()
        os.write(writing, token.encode())
        os.close(writing)
        try:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment,
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(reading)
        assert process.stderr is not None
        with process.stderr:
            lines = deque(process.stderr, maxlen=NUM_LAST_LINES)
        text = b"".join(lines).decode(errors="replace")
        return AgentEnd(host=socket.gethostname(), code=process.wait(), last_lines=text)


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
