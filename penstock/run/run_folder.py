"""Manages the folder of a run: its `config.yaml`, the lock on it, and what a resumed run finds in it.

`config.yaml` has secrets hidden, and a last line with a checksum that shows whether the file is complete: an
empty file, or half of one, would be a config with default settings.
"""

import fcntl
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from penstock.checksums import check_files
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.config.secrets import hidden
from penstock.durability.checkpoints import (
    BEGINNING,
    Progress,
    newest_whole,
    open_checkpoint,
    read_progress,
)
from penstock.durability.kept_checkpoints import (
    best_of,
    checkpoints_of,
    put_aside_past,
    rewards_of,
    sweep_unfinished,
)
from penstock.durability.run_facts import read_facts
from penstock.errors import UserError
from penstock.observe.writers.metrics_jsonl import put_aside_rows_past
from penstock.processes.run_processes import wait_for_orphans
from penstock.safe_files import open_private, write_private

FILE = "config.yaml"
LAST_LINE = "# checksum: "
LOCK = ".lock"
METRICS = "metrics.jsonl"
FIXED = (
    "model.name",
    "model.lora",
    "model.adapter",
    "run.name",
    "run.folder",
    "run.seed",
    "run.deterministic",
)
"""Settings that a resumed run can't change."""


def write_config(run: Path, config: PenstockConfig) -> None:
    text = to_yaml(config)
    write_private(run / FILE, f"{text}{last_line(text)}\n")


def to_yaml(config: PenstockConfig) -> str:
    """Write the config as YAML with secrets hidden, since people share run folders."""
    return yaml.safe_dump(shown(config), sort_keys=False, allow_unicode=True)


def shown(config: PenstockConfig) -> dict[str, Any]:
    """Return the config's sections with secrets hidden.

    Keys of `algorithm` and `launcher.resources` name functions, settings and resources, so a key such as
    `truncated_token` is no secret.
    """
    sections = config.model_dump(mode="json")
    resources = sections["launcher"].pop("resources")
    found = {name: hidden(section, only_texts=name == "algorithm") for name, section in sections.items()}
    found["launcher"]["resources"] = hidden(resources, only_texts=True)
    return found


def last_line(text: str) -> str:
    """Return the checksum line of a file with this text before it. Line endings do not count."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return f"{LAST_LINE}{zlib.crc32(chr(10).join(lines).encode()):08x}"


def check_config(run: Path) -> None:
    """Refuse a file that differs from what Penstock wrote, unless the user has updated its last line."""
    path = run / FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; restore it from a copy") from error
    body, found, last = text.rpartition(LAST_LINE)
    body = body if found else text
    if not body.strip():
        raise UserError(
            f"{path} is empty, which would be a run with default settings; restore it from a copy"
        )
    wanted = last_line(body)
    if found + last.strip() != wanted:
        raise UserError(
            f"{path} is not as Penstock wrote it: it is damaged or was edited. Restore it, and give changes on the "
            f"command line (penstock resume {run} run.steps=500); if the file is right as it is, let its last line "
            f"be: {wanted}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """Holds a run that can be resumed: its folder, and the checkpoint to resume from."""

    folder: Path
    checkpoint: Path | None
    """None: it was stopped before the first one, and resumes from its model with what its journal has."""
    progress: Progress
    words: tuple[str, ...] = ()
    """Log lines about newer checkpoints that are damaged."""

    @property
    def rows_until(self) -> int:
        """Return the last step whose metric rows stay. Before the first checkpoint, all steps are made again."""
        return -1 if self.checkpoint is None else self.progress.step


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the run folder for this process. The lock ends with the process, however that ends."""
    with open_private(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by a run that is still running; stop that one first"
            ) from None
        yield


def is_held(folder: Path) -> bool:
    """Return whether a running run holds the lock on the folder."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def load_saved_run(
    folder: Path, overrides: list[str], step: int | Literal["best"] | None = None
) -> tuple[PenstockConfig, SavedRun]:
    """Return the config of a run to resume, and the checkpoint to resume from: that of `step`, or the last.

    The workers of a killed controller have ended when the checkpoint is chosen.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in FIXED or key.startswith("model.lora."):
            raise UserError(f"{key} can't be changed when a run is resumed; start another run for that")
    chosen_again = [f"{setting}=auto" for setting in read_facts(folder).auto]
    check_config(folder)
    config = load_config(PenstockConfig, folder / FILE, [*chosen_again, *overrides])
    if not is_held(folder):  # `held` refuses a folder in use
        wait_for_orphans(folder)
    words: list[str] = []
    checkpoint, progress = _choose(folder, step, words.append)
    if progress.only_in_python:
        raise UserError(
            f"{folder} was given its {' and '.join(progress.only_in_python)} as a Python object, which its config "
            "can't name; only runs whose parts are files or import paths can be resumed"
        )
    done = progress.step
    if done >= config.run.steps:
        raise UserError(f"{folder} has done its {done} steps; set more to continue: run.steps={done + 100}")
    return config, SavedRun(folder=folder, checkpoint=checkpoint, progress=progress, words=tuple(words))


def _choose(
    folder: Path, step: int | Literal["best"] | None, say: Callable[[str], None]
) -> tuple[Path | None, Progress]:
    """Choose a checkpoint and read its progress. None: the run resumes from its beginning."""
    found = checkpoints_of(folder)
    if step is None and (newest := newest_whole(folder, say)) is not None:
        return newest
    wanted = best_of(rewards_of(folder)) if step == "best" else step
    if wanted in found:
        return found[wanted], open_checkpoint(found[wanted])
    if (wanted == 0 or step is None) and (folder / BEGINNING).is_dir():
        check_files(folder / BEGINNING)
        return None, read_progress(folder / BEGINNING)
    if step is None:
        raise UserError(
            f"{folder} has no checkpoint to resume from; set run.checkpoint_every when a run is started (its "
            f"model, if there is one, is in {folder / 'model'})"
        )
    known = ", ".join(map(str, found)) or "none"
    what = "that was evaluated" if step == "best" else f"of step {step}"
    raise UserError(f"{folder} has no checkpoint {what}; it has checkpoints of steps: {known}")


def put_in_order(saved: SavedRun, config: PenstockConfig, say: Callable[[str], None]) -> None:
    """Keep in the folder of a resumed run what belongs to its checkpoint, and move away what came after."""
    for word in saved.words:
        say(word)
    step = saved.progress.step
    if later := put_aside_past(saved.folder, step):
        aside = ", ".join(map(str, later))
        say(f"going back to step {step}: checkpoints of steps {aside} are now in undone/")
    sweep_unfinished(saved.folder)
    put_aside_rows_past(saved.folder / METRICS, saved.rows_until)
    write_config(saved.folder, config)
