"""Decides which checkpoints of a run are kept: the last few, and the one with the highest held-out reward.

    RUN/checkpoints/step-N/heldout.json    its held-out reward, once it is known
                    latest, best           a link to one checkpoint each

A reward belongs to a checkpoint when the evaluation began at its step.
"""

import contextlib
import math
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from penstock.safe_files import OLD, replace_link, write_private
from penstock.trainer.trainer_start import LATEST, MODEL

FOLDER = "checkpoints"
PROGRESS = "progress.json"
HELDOUT = "heldout.json"
BEST = "best"
UNDONE = "undone"
"""The folder of a run with checkpoints of undone steps."""
_NAME = re.compile(r"step-(\d+)")


class HeldoutReward(msgspec.Struct, frozen=True):
    reward: float


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, oldest first. Each got its name when it was complete."""
    found = {}
    for path in (run / FOLDER).glob("step-*"):
        named = _NAME.fullmatch(path.name)
        if named and path.is_dir():
            found[int(named[1])] = path
    return dict(sorted(found.items()))


def sweep_unfinished(run: Path) -> None:
    """Remove what a killed run left half written or half removed, a model or a checkpoint, and repair the links."""
    for old in run.glob(f".{MODEL}.*/{OLD}"):
        if not (run / MODEL).exists():  # killed after the old model had made way for the new one
            old.rename(run / MODEL)
    for path in (*(run / FOLDER).glob(".*"), *run.glob(f".{MODEL}.*")):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
    for name in (LATEST, BEST):
        link = run / FOLDER / name
        if link.is_symlink() and not link.exists():
            link.unlink()
    found = checkpoints_of(run)
    if found:
        replace_link(run / FOLDER / LATEST, found[max(found)].name)
    point_to_best(run)


def put_aside_past(run: Path, step: int) -> list[int]:
    """Move checkpoints of later steps to `undone`, since their history is given up. Return their steps.

    The last one goes first, so that a crash leaves no gap.
    """
    later = [number for number in checkpoints_of(run) if number > step]
    for number in reversed(later):
        path = checkpoints_of(run)[number]
        aside = run / UNDONE / path.name
        aside.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return later


def keep_reward(checkpoint: Path, reward: float) -> None:
    """Save a reward with its checkpoint. A reward that could not be measured is not saved."""
    if math.isfinite(reward):
        write_private(checkpoint / HELDOUT, msgspec.json.encode(HeldoutReward(reward)).decode())


def rewards_of(run: Path) -> dict[int, float]:
    """Return the held-out rewards of the checkpoints that were evaluated, by step."""
    rewards = {}
    for step, path in checkpoints_of(run).items():
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # not evaluated, or being removed
            file = (path / HELDOUT).read_bytes()
            rewards[step] = msgspec.json.decode(file, type=HeldoutReward).reward
    return rewards


def best_of(rewards: Mapping[int, float]) -> int | None:
    """Return the step with the highest reward, the last of several; None without any."""
    return max(rewards, key=lambda step: (rewards[step], step), default=None)


def point_to_best(run: Path) -> None:
    best = best_of(rewards_of(run))
    if best is not None:
        replace_link(run / FOLDER / BEST, checkpoints_of(run)[best].name)


def superfluous(
    found: Collection[int], *, step: int, keep: int, rewards: Mapping[int, float], evaluating: Collection[int]
) -> list[int]:
    """Return the checkpoints to remove once that of `step` exists, among them those of later steps, whose
    history was given up.

    A checkpoint that is being evaluated may turn out to be the best, so it stays.
    """
    older = sorted(number for number in found if number < step)
    kept = {*older[max(0, len(older) - keep + 1) :], *evaluating}
    best = best_of({number: reward for number, reward in rewards.items() if number <= step})
    return sorted(number for number in found if number != step and number not in kept and number != best)
