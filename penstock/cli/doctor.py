"""Diagnoses a run for `penstock doctor`, running or ended: what each process does, what waits, and usual causes."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from penstock.cli.samples import run_folder
from penstock.durability.durable_log import FOLDER, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.loop.attempts import UNDER_WAY, Attempts, AttemptState
from penstock.observe.plain_text import plain_line
from penstock.observe.writers.recoveries_jsonl import read_recoveries
from penstock.processes.run_processes import RunProcess, processes_of_run, stacks_of
from penstock.run.monitor import read_standing
from penstock.run.run_folder import METRICS, is_held

LAST_LINES = 5
SHOWN_FRAMES = 8
QUIET_S = 60.0
LITTLE_BYTES = 200e6


def diagnose(name: str) -> Iterator[str]:
    folder = run_folder(name)
    is_live, processes = is_held(folder), processes_of_run(folder)
    quiet_s = _quiet_s(folder)
    ended_early = None if is_live else _ended_early(folder)
    yield f"{folder}: {'is running' if is_live else _how_it_ended(ended_early)}"
    yield from _progress(folder, quiet_s)
    if is_live or ended_early is None:
        yield from _standing(folder)
    for process in processes:
        yield f"{process.name} (pid {process.pid}) {process.state}"
        yield from _frames(process)
    if not is_live:
        yield from _log_tails(folder)
    causes = list(_usual_causes(folder, processes, is_live=is_live, quiet_s=quiet_s))
    if causes:
        yield from causes
    elif is_live or ended_early is not None:
        yield "nothing looks wrong from here"


def _how_it_ended(early: bool | None) -> str:
    if early is None:
        return "has ended without a summary: it was killed, or failed with an error that it printed"
    return "was stopped, and saved its model" if early else "has made all of its steps"


def _progress(folder: Path, quiet_s: float | None) -> Iterator[str]:
    rows = (folder / METRICS).read_text(errors="replace").splitlines() if quiet_s is not None else []
    if rows:
        kept = ", ".join(map(str, checkpoints_of(folder)))
        checkpoints = f"checkpoints of steps {kept}" if kept else "no checkpoints"
        yield f"step {_step(rows[-1])}, {quiet_s:.0f} s ago; {checkpoints}"
    else:
        yield "no step yet"
    if (folder / FOLDER).is_dir():
        yield from _groups(read_attempts(DiskFiles(folder / FOLDER), keeps_content=False))
    recoveries = read_recoveries(folder)
    if recoveries:
        counts = Counter(event.worker for event in recoveries)
        lost = ", ".join(f"{worker} {count} times" for worker, count in sorted(counts.items()))
        yield f"lost and replaced: {lost}; the last time: {plain_line(recoveries[-1].cause)}"


def _groups(attempts: Attempts) -> Iterator[str]:
    """Yield how many groups are in each state, the oldest that still waits in each, and why some were dropped."""
    counts = attempts.counts()
    yield "groups: " + ", ".join(f"{counts[state]} {state}" for state in AttemptState if counts[state])
    for state in (*UNDER_WAY, AttemptState.SCORED):
        oldest = min(
            (one.ticket.number for one in attempts.by_number.values() if one.state == state), default=None
        )
        if oldest is not None:
            task = plain_line(attempts.by_number[oldest].task_id, 60)
            yield f"    the oldest {state}: group {oldest} (task {task})"
    for reason, count in attempts.drops().most_common():
        yield f"    {count:,} dropped for {plain_line(reason, 60)}"


def _standing(folder: Path) -> Iterator[str]:
    """Yield the run's last report of who waits for whom, and its age."""
    standing = read_standing(folder)
    if standing is not None:
        yield f"{max(0.0, time.time() - standing.wall_s):.0f} s ago:"
        yield from (f"    {plain_line(line)}" for line in standing.lines)


def _frames(process: RunProcess) -> Iterator[str]:
    """Yield the stack of the process's main thread. A stopped process writes none."""
    stacks = stacks_of(process)
    main = stacks.rpartition("Thread 0x")[2].splitlines()[1:] if stacks else []
    for line in main[:SHOWN_FRAMES]:
        yield f"    {plain_line(line.strip())}"


def _log_tails(folder: Path) -> Iterator[str]:
    for log in sorted((folder / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        if lines:
            yield f"{log.stem} said last:"
            yield from (f"    {plain_line(line)}" for line in lines)


def _usual_causes(
    folder: Path, processes: list[RunProcess], *, is_live: bool, quiet_s: float | None
) -> Iterator[str]:
    for process in processes:
        if "SIGSTOP" in process.state:
            yield f"{process.name} is stopped: `kill -CONT {process.pid}`, or wait for run.freeze_s"
    if shutil.disk_usage(folder).free < LITTLE_BYTES:
        yield f"the disk of {folder} is full: make room, and the run continues"
    if not is_live and checkpoints_of(folder) and _ended_early(folder) is not False:
        yield f"`penstock resume {folder}` resumes from step {max(checkpoints_of(folder))}"
    if is_live and not {"trainer"} <= {process.name for process in processes}:
        yield "there is no trainer now: the run starts, or starts another one"
    if is_live and quiet_s is not None and quiet_s > QUIET_S:
        yield (
            f"no step for {quiet_s:.0f} s: a reward that hangs (reward.timeout_s), long answers, or a process "
            "above that waits for something that never comes"
        )


def _ended_early(folder: Path) -> bool | None:
    """Return whether the run was stopped before its last step; None if no summary says."""
    try:
        return bool(json.loads((folder / "summary.json").read_text())["stopped_early"])
    except (OSError, ValueError, KeyError):
        return None


def _quiet_s(folder: Path) -> float | None:
    """Return the seconds since the last row of metrics; None if there is none."""
    path = folder / METRICS
    return time.time() - path.stat().st_mtime if path.is_file() else None


def _step(row: str) -> int | str:
    try:
        return int(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return "?"
