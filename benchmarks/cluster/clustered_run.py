"""A run of the demo over the nodes of a cluster, in processes of its own, and what it says as it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.namespaced_nodes import NamespacedCluster, NamespacedNode
from penstock.errors import PenstockError

PENSTOCK = (sys.executable, "-c", "from penstock.cli import main; main()")
PLACES = "launcher.resources={trainer: {home: 1}, scorer: {home: 1}, engine: {engine: 1}}"
LOOK_AGAIN_S = 0.05
TIMEOUT_S = 120.0


class ClusteredRun:
    """`with` it: it is stopped in order in the end, and `close` kills what is left."""

    def __init__(
        self, cluster: NamespacedCluster, folder: Path, *settings: str, node: NamespacedNode | None = None
    ) -> None:
        """The controller runs on `node`, or on the head."""
        self.folder = folder / "demo"
        self.output = folder / "output.txt"
        own = ("launcher.kind=ray", PLACES, "observe.view=plain", "eval.every=0", f"run.folder={folder}")
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                cluster.command(*PENSTOCK, "train", *own, *settings, node=node),
                stdout=output,
                stderr=output,
                env=cluster.environment,
            )

    def wait_for(self, text: str, *, after: int = 0, patience_s: float = TIMEOUT_S) -> tuple[float, int]:
        """Until it has said this, after so many characters of what it said; when that was, and how much it had said
        then."""
        deadline = time.monotonic() + patience_s
        while True:
            said = self.said()
            found = said.find(text, after)
            if found >= 0:
                return time.monotonic(), found + len(text)
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PenstockError(f"the run did not say {text!r}: {said[-3000:]}")
            time.sleep(LOOK_AGAIN_S)

    def wait_for_step(self, step: int, *, patience_s: float = TIMEOUT_S) -> float:
        deadline = time.monotonic() + patience_s
        while self.steps < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PenstockError(f"the run did not reach step {step}: {self.said()[-3000:]}")
            time.sleep(LOOK_AGAIN_S)
        return time.monotonic()

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def steps(self) -> int:
        """How many it has done."""
        return max((int(row["step"]) for row in self._rows()), default=0)

    @property
    def rewards(self) -> list[float]:
        """The held-out ones."""
        return [row["heldout_reward"] for row in self._rows() if "heldout_reward" in row]

    def stop(self, patience_s: float = TIMEOUT_S) -> int:
        """In order: the model is saved; the exit code."""
        os.kill(self._controller(), signal.SIGTERM)
        return self._process.wait(patience_s)

    def wait(self, patience_s: float = 600.0) -> int:
        return self._process.wait(patience_s)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> "ClusteredRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _controller(self) -> int:
        """`nsenter` has started it, and passes no signals on."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def _rows(self) -> list[dict[str, float]]:
        try:
            lines: Sequence[str] = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]
