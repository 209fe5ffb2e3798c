"""Kill a demo run at random moments, a worker first and then its controller, resume it, and audit what came out.

    python tools/kill_run.py --kills 10 --folder FOLDER --json FILE

A kill comes at any time after the start of a process: while it starts, recovers, or trains. In most lives a worker
is killed before the controller, soon after it was there. After each life, checkpoint and journal are
compared. Beside it runs the same demo without kills. It ends with exit code 1 when a group was trained twice, when
the journal says other than the last checkpoint, when a run did not reach its last step or was over before it was
killed, or when the held-out reward is not that of the run without kills.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.bench.chaos.noted_turns import NOTES, count_again, json_lines
from penstock.bench.chaos.run_audit import complaints_of
from penstock.durability.checkpoints import BEGINNING
from penstock.durability.kept_checkpoints import PROGRESS, checkpoints_of
from penstock.observe.writers.recoveries_jsonl import read_recoveries
from penstock.processes.run_processes import processes_of_run

SETTINGS = [
    "run.checkpoint_every=10",
    "observe.view=plain",
    "rollout.workflow=penstock.bench.chaos.noted_turns:answer",
]
PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()"]
GROUPS_PER_STEP = 16
"""Of the demo."""
TOLERANCE = 0.04
"""Between held-out rewards of two runs: with 512 answers each, of which about 96 % are right, their difference has
a standard deviation of 0.012."""
LOADING_S = 5.0
"""About what a worker takes to load."""
GOING_ON = re.compile(
    r"resuming after step (\d+) with (\d+) finished groups from the journal; (\d+) groups were under way, (\d+) of "
    r"their episodes finished, and (\d+) tokens"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest-s", type=float, default=20.0, help="the longest time between a start and its kill"
    )
    parser.add_argument(
        "--workers", type=float, default=0.75, help="in which share of the lives a worker is killed first"
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    killed, whole = (
        Arm(options.folder, "killed", options.steps),
        Arm(options.folder, "undisturbed", options.steps),
    )
    kills, complaints = [], list[str]()
    for number in range(1, options.kills + 1):
        worker_rng = rng if rng.random() < options.workers else None
        kills.append(killed.play_and_kill(rng.uniform(0, options.longest_s), worker_rng))
        print(f"kill {number}: {kills[-1]}", flush=True)
        complaints += [f"kill {number}: {one}" for one in killed.complaints_after(kills[-1])]
    for arm in (killed, whole):
        arm.play()
    complaints += killed.complaints() + whole.complaints()
    complaints += heldout_complaints(killed.heldout(), whole.heldout())
    report = {
        "headline": {"violations": len(complaints), "kills": options.kills, **killed.regenerated()},
        "heldout_reward": {arm.name: arm.heldout() for arm in (killed, whole)},
        "complaints": complaints,
        "killed": kills,
        "resumed": killed.resumed(),
        "recoveries": [f"{one.worker}: {one.cause}" for one in read_recoveries(killed.run)],
    }
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(1 if complaints else 0)


class Arm:
    """One run of the demo, begun anew or gone on with."""

    def __init__(self, folder: Path, name: str, steps: int) -> None:
        self.name = name
        self.run = folder / name
        self._steps = steps
        self._output = folder / f"{name}.txt"
        self._notes = folder / f"{name}.turns.jsonl"
        own = [f"run.name={name}", f"run.steps={steps}", f"run.folder={folder}"]
        self._command = ["train", *SETTINGS, *own]

    def play(self) -> None:
        """To its end."""
        with self._output.open("ab") as output:
            self._start(output).wait()

    def play_and_kill(self, after_s: float, worker_rng: random.Random | None) -> dict[str, Any]:
        """The controller is killed this long after its start, wherever it is by then, and a worker of it before."""
        worker = None
        with self._output.open("ab") as output:
            process = self._start(output)
            until = time.monotonic() + after_s
            if worker_rng is not None:
                worker = self._kill_a_worker(worker_rng, until)
            ended = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
        if can_resume(self.run):
            self._command = ["resume", str(self.run)]
        else:  # it had not begun: it begins again, under the same name
            shutil.rmtree(self.run, ignore_errors=True)
        steps = list(checkpoints_of(self.run))
        return {
            "after_s": round(after_s, 1),
            "worker": worker,
            "step": last_step(self.run),
            "checkpoint": steps[-1] if steps else None,
            "ended": ended,
        }

    def _kill_a_worker(self, rng: random.Random, until: float) -> str | None:
        """Soon after there is one: while it loads, or a little later. Returns its name."""
        while time.monotonic() < until:
            if there := processes_of_run(self.run):
                victim = rng.choice(there)
                time.sleep(max(0.0, min(rng.uniform(0, LOADING_S), until - time.monotonic())))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                return victim.name
            time.sleep(0.05)
        return None

    def complaints_after(self, kill: dict[str, Any]) -> list[str]:
        """What is wrong in between."""
        found = complaints_of(self.run, steps=None, groups_per_step=GROUPS_PER_STEP)
        if kill["ended"] is not None:
            found.append(
                f"the run had ended by itself with exit code {kill['ended']}; give it more --steps, or see its "
                "output"
            )
        return found

    def heldout(self) -> list[float]:
        """Mean held-out rewards, in the order of their steps."""
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        found = {row["step"]: row["heldout_reward"] for row in rows if "heldout_reward" in row}
        return [round(found[step], 4) for step in sorted(found)]

    def resumed(self) -> list[dict[str, int]]:
        """What was kept each time the run went on."""
        names = ("after_step", "finished_groups", "groups_under_way", "ended_episodes", "kept_tokens")
        text = " ".join(self._output.read_text().split())
        return [dict(zip(names, map(int, found), strict=True)) for found in GOING_ON.findall(text)]

    def regenerated(self) -> dict[str, float]:
        again, sampled = count_again(json_lines(self._notes))
        return {"regenerated_fraction": round(again / max(1, sampled), 5), "tokens": sampled}

    def complaints(self) -> list[str]:
        """What is wrong; nothing when every group was trained once."""
        found = complaints_of(self.run, steps=self._steps, groups_per_step=GROUPS_PER_STEP)
        return [f"{self.name}: {one}" for one in found]

    def _start(self, output: Any) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, NOTES: str(self._notes.resolve())}
        return subprocess.Popen([*PENSTOCK, *self._command], stdout=output, stderr=output, env=environment)


def can_resume(run: Path) -> bool:
    return bool(checkpoints_of(run)) or (run / BEGINNING / PROGRESS).is_file()


def last_step(run: Path) -> int | None:
    """Of the rows of metrics; None before the first. The last row may be cut off."""
    path, last = run / "metrics.jsonl", None
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError):
            last = json.loads(line)["step"]
    return last


def heldout_complaints(killed: list[float], whole: list[float]) -> list[str]:
    """Whether kills have changed what was learnt: the last mean held-out rewards are compared."""
    if not killed or not whole:
        return ["there is no held-out reward to compare"]
    if abs(killed[-1] - whole[-1]) <= TOLERANCE:
        return []
    return [
        f"the held-out reward is {killed[-1]} with kills and {whole[-1]} without; they may differ by {TOLERANCE}"
    ]


if __name__ == "__main__":
    main()
