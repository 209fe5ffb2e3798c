"""A stand-in for `nvidia-cuda-mps-control` that writes down how it was called."""

import os
from collections.abc import Mapping
from pathlib import Path

SCRIPT = """#!/bin/sh
said=$([ "$1" = -d ] || cat)
echo "$1$said $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> "{calls}"
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 9
{then}
"""


class FakeMps:
    """`environ` has it first on its PATH. `then` is what the script does after writing down a call."""

    def __init__(self, folder: Path, then: str = "") -> None:
        self._calls = folder / "mps-calls"
        binaries = folder / "mps-bin"
        binaries.mkdir()
        script = binaries / "nvidia-cuda-mps-control"
        script.write_text(SCRIPT.format(calls=self._calls, then=then))
        script.chmod(0o755)
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        self.environ: Mapping[str, str] = {**os.environ, "PATH": path}

    @property
    def calls(self) -> list[list[str]]:
        """Each call's words: what it was told, and the two folders."""
        return [line.split() for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    @property
    def told(self) -> list[str]:
        return [call[0] for call in self.calls]
