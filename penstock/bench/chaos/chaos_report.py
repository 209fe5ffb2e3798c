"""Runs `penstock chaos`: faults at random moments, then the audit and the figures. The report is saved after
every fault, so an interrupted one keeps what it has seen."""

import contextlib
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.bench.chaos.disturbed_run import DisturbedRun
from penstock.bench.chaos.faults import Fault, choose
from penstock.bench.chaos.noted_turns import json_lines
from penstock.errors import PenstockError
from penstock.observe.writers.recoveries_jsonl import read_recoveries
from penstock.run.run_folder import METRICS
from penstock.safe_files import write_private

MOST_BYTES = 64
"""Most bytes that are torn from the journal, or that it may still grow by."""
WAITS = 0.25
"""Share of the faults after which the next one waits until the run has recovered."""
MOST_COMPLAINTS = 5
"""Faults stop after this many complaints, since more would only repeat them."""


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """Records what has happened so far, saved as it grows."""

    seed: int
    disturbed: DisturbedRun
    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Every fault: when it came, and how long its recovery was waited for."""
    begun: float = field(default_factory=time.monotonic)
    ended: str = "not yet"

    def add(self, fault: Fault, *, at: float, waited: bool) -> None:
        now = time.monotonic()
        row = {"fault": str(fault), "at_s": round(at - self.begun, 1)}
        self.rows.append(row | ({"waited_s": round(now - at, 1)} if waited else {}))
        self.save()

    def end(self, how: str) -> None:
        self.ended = how
        self.save()

    def save(self) -> None:
        if self.path is not None:
            write_private(self.path, json.dumps(self.data(), indent=2) + "\n")

    def data(self) -> dict[str, Any]:
        run, complaints = self.disturbed.run, self.disturbed.complaints
        recoveries = read_recoveries(run)
        return {
            "headline": {
                "violations": len(complaints),
                "kills": len(self.rows),
                "engine_recovery_s": _median([one.took_s for one in recoveries if "engine" in one.worker]),
                "trainer_recovery_s": _median([one.took_s for one in recoveries if one.worker == "trainer"]),
                "regenerated_fraction": round(self.disturbed.regenerated_fraction(), 4),
            },
            "ended": self.ended,
            "took_s": round(time.monotonic() - self.begun, 1),
            "seed": self.seed,
            "steps": self.disturbed.steps,
            "faults": dict(Counter(row["fault"] for row in self.rows)),
            "complaints": complaints,
            "heldout_reward": _heldout(run),
            "folder": str(run),
            "suffered": self.rows,
        }


def run(
    json_path: Path | None = None,
    *,
    kills: int = 10,
    seed: int = 0,
    steps: int = 60,
    longest_s: float = 4.0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Disturb a run in `folder`, which is kept. Ctrl-C and SIGTERM end it early, and what is left is audited."""
    folder = folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    disturbed = DisturbedRun(folder, steps=steps, seed=seed)
    report = ChaosReport(seed=seed, disturbed=disturbed, path=json_path)
    with _terminated_as_interrupted():
        try:
            _disturb(report, kills, longest_s)
            disturbed.end()
            disturbed.complaints += disturbed.audit(disturbed.steps)
            report.end("after its last step")
        except PenstockError as error:
            disturbed.complaints.append(str(error))
            disturbed.kill()
            report.end("given up")
        except BaseException:
            disturbed.kill()
            report.end("cut off")
            raise
    data = report.data()
    print(json.dumps(data, indent=2))
    return data


def _disturb(report: ChaosReport, kills: int, longest_s: float) -> None:
    rng, disturbed = random.Random(report.seed), report.disturbed
    while len(report.rows) < kills:
        if len(disturbed.complaints) >= MOST_COMPLAINTS:
            raise PenstockError(f"no more faults after {len(disturbed.complaints)} violations")
        if not disturbed.is_running:
            disturbed.begin()
        time.sleep(rng.uniform(0.0, longest_s))
        fault, num_bytes = choose(rng), rng.randint(1, MOST_BYTES)
        waits, at = rng.random() < WAITS, time.monotonic()
        if not disturbed.is_running:
            disturbed.note_end()
        elif disturbed.apply(fault, num_bytes, wait=waits):
            report.add(fault, at=at, waited=waits)
            print(f"{len(report.rows)} of {kills}: {fault}", flush=True)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let a scheduler's SIGTERM end the block as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _heldout(run: Path) -> list[tuple[int, float]]:
    rows = json_lines(run / METRICS)
    found = {row["step"]: row["heldout_reward"] for row in rows if "heldout_reward" in row}
    return [(step, round(found[step], 4)) for step in sorted(found)]
