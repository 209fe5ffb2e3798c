"""Kill the controller of a demo run at random moments, resume it each time, and audit what came out.

    python tools/kill_run.py --kills 10 --folder FOLDER --json FILE

Beside it runs the same demo without kills. It ends with exit code 1 when a group was trained twice, when the ledger
says other than the last checkpoint, or when a run did not reach its last step.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.bench.chaos.noted_turns import NOTES, count_again
from penstock.bench.chaos.run_audit import complaints_of
from penstock.orchestration.kept_checkpoints import checkpoints_of

SETTINGS = [
    "run.checkpoint_every=10",
    "observe.view=plain",
    "rollout.workflow=penstock.bench.chaos.noted_turns:answer",
]
PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()"]
GROUPS_PER_STEP = 16
"""Of the demo."""
GOING_ON = re.compile(
    r"going on after step (\d+) with (\d+) finished groups from the journal; (\d+) groups were under way, (\d+) of "
    r"their episodes finished, and (\d+) tokens"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest-s", type=float, default=8.0, help="the longest time of training before a kill"
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
    kills = []
    for number in range(1, options.kills + 1):
        kills.append(killed.play_and_kill(rng.uniform(0, options.longest_s)))
        print(f"kill {number}: {kills[-1]}", flush=True)
    for arm in (killed, whole):
        arm.play()
    complaints = killed.complaints() + whole.complaints()
    report = {
        "headline": {"violations": len(complaints), "kills": options.kills, **killed.regenerated()},
        "heldout_reward": {arm.name: arm.heldout() for arm in (killed, whole)},
        "complaints": complaints,
        "killed": kills,
        "resumed": killed.resumed(),
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

    def play_and_kill(self, after_s: float) -> dict[str, Any]:
        """The controller is killed this long after it has begun to train and there is a checkpoint."""
        metrics = self.run / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        with self._output.open("ab") as output:
            process = self._start(output)
            while process.poll() is None and not (
                checkpoints_of(self.run) and metrics.stat().st_size > before
            ):
                time.sleep(0.2)
            time.sleep(after_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._command = ["resume", str(self.run)]
        rows = metrics.read_text().splitlines()
        return {"after_s": round(after_s, 1), "step": json.loads(rows[-1])["step"]}

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
        again, sampled = count_again(self._notes.read_text().splitlines())
        return {"regenerated_fraction": round(again / sampled, 5), "tokens": sampled}

    def complaints(self) -> list[str]:
        """What is wrong; nothing when every group was trained once."""
        found = complaints_of(self.run, steps=self._steps, groups_per_step=GROUPS_PER_STEP)
        return [f"{self.name}: {one}" for one in found]

    def _start(self, output: Any) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, NOTES: str(self._notes.resolve())}
        return subprocess.Popen([*PENSTOCK, *self._command], stdout=output, stderr=output, env=environment)


if __name__ == "__main__":
    main()
