"""How often the promise is broken: many random schedules of crashes, each audited (`benchmarks.crashes`).

A run of the real controller, in virtual time with simulated workers and a simulated disk, crashes up to five times
at random awaits, half of the times with a loss of power, and is resumed each time. `pytest
tests/durability/test_recovery.py --seeds 10000` plays the same ones.
"""

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.crashes.crash_audit import audit
from benchmarks.crashes.crash_world import CrashWorld
from penstock.bench.saved_report import SavedReport

SCHEDULES = 500
WORKERS = 2
TOLD_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of one schedule."""

    seed: int
    crashes: int
    num_sampled: int
    num_again: int
    """Tokens that were sampled though a token had been sampled in their place."""
    violation: str | None
    """How it broke the promise."""


def run(report: SavedReport, console: Console, *, schedules: int = SCHEDULES) -> None:
    """Says and saves them as they come."""
    played: list[Played] = []
    with ProcessPoolExecutor(max_workers=WORKERS) as pool:
        for one in pool.map(play, range(schedules), chunksize=10):
            played.append(one)
            if len(played) % TOLD_EVERY == 0 or len(played) == schedules:
                _tell(summed(played), report, console)
    for line in report.data["crashes"]["broken"]:
        console.print(line, highlight=False, soft_wrap=True)


def _tell(result: dict[str, Any], report: SavedReport, console: Console) -> None:
    report.put("crashes", value=result)
    report.headline({"violations": result["violations"], "schedules": result["schedules"]})
    console.print(
        f"{result['schedules']} schedules with {result['crashes']} crashes: {result['violations']} violations, "
        f"{result['regenerated_fraction']:.1%} of the tokens sampled again",
        highlight=False,
        soft_wrap=True,
    )


def play(seed: int, check: Callable[[CrashWorld], None] = audit) -> Played:
    folder = Path(tempfile.mkdtemp(prefix="penstock-crashes-"))
    world = CrashWorld(seed, folder / "run")
    violation = None
    try:
        world.play()
        check(world)
    except Exception as error:
        violation = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Played(
        seed=seed,
        crashes=world.crashes,
        num_sampled=len(world.truth.tokens),
        num_again=world.truth.num_again,
        violation=violation,
    )


def summed(played: list[Played]) -> dict[str, Any]:
    broken = [one for one in played if one.violation is not None]
    return {
        "schedules": len(played),
        "violations": len(broken),
        "crashes": sum(one.crashes for one in played),
        "regenerated_fraction": sum(one.num_again for one in played)
        / max(1, sum(one.num_sampled for one in played)),
        "broken": [
            f"seed {one.seed}: {one.violation}; replay it: pytest tests/durability/test_recovery.py "
            f"-k any_crash --first-seed {one.seed} --seeds 1"
            for one in broken
        ],
    }
