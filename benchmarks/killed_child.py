"""A run of `benchmarks.killed_run`, in a process of its own that kills itself at a given moment.

It is killed right after it has heard from an engine, so what it noted of the tokens is what it knew when it died.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.bench.loop_settings import CHUNK_TOKENS, GENERATION_BOUND, STALENESS, prepared_run
from penstock.durability.checkpoints import read_progress
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.observe.events import AnyEvent, Counters, PhaseEvent
from penstock.observe.readers import show
from penstock.observe.run_state import RunState
from penstock.observe.views import SilentView
from penstock.run.run import Run
from penstock.run.run_folder import SavedRun
from penstock.safe_files import write_private

CHECKPOINT_EVERY = 3


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Note:
    """What a life knows of itself, on the disk for whoever survives it. Reads the events of the run."""

    def __init__(
        self,
        state: RunState,
        path: Path,
        kill_after_s: float | None,
        *,
        now: Callable[[], float] = time.time,
        kill: Callable[[], None] = kill_this_process,
    ) -> None:
        """`kill_after_s` counts from the moment at which training begins, and there is a checkpoint."""
        self._state = state
        self._path = path
        self._kill_after_s = kill_after_s
        self._now = now
        self._kill = kill
        self.training_at: float | None = None

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, PhaseEvent) and event.phase == "training" and self.training_at is None:
            self.training_at = self._now()
        elif isinstance(event, Counters) and self.training_at is not None and "tokens" in event.values:
            self._hear()

    def close(self) -> None:
        self._write()

    def _hear(self) -> None:
        assert self.training_at is not None
        self._write()
        is_due = self._kill_after_s is not None and self._now() > self.training_at + self._kill_after_s
        if is_due and checkpoints_of(self._path.parent):
            self._kill()

    def _write(self) -> None:
        tokens = sum(engine.tokens.total for engine in self._state.engines)
        write_private(self._path, json.dumps({"training_at": self.training_at, "tokens": tokens}))


def live(model: Path, folder: Path, note: Path, steps: int, kill_after_s: float | None) -> None:
    """One life of the run in `folder`: from its last checkpoint, where there is one."""
    sections: dict[str, dict[str, Any]] = {
        "rollout": {"chunk_tokens": CHUNK_TOKENS},
        "run": {"steps": steps, "checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 9},
    }
    prepared = prepared_run(GENERATION_BOUND, STALENESS, model, folder, more=sections)
    Path(prepared.folder).rmdir()
    saved = next(reversed(checkpoints_of(folder).values()), None)
    going_on = None
    if saved is not None:
        going_on = SavedRun(folder=folder, checkpoint=saved, progress=read_progress(saved))
    shown = show(SilentView())
    shown.stream.subscribe("note", Note(shown.state, note, kill_after_s))
    asyncio.run(Run(replace(prepared, folder=folder, saved=going_on), shown).run())


if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    live(
        Path(words["model"]),
        Path(words["folder"]),
        Path(words["note"]),
        words["steps"],
        words["kill_after_s"],
    )
