"""Kill the controller of a demo run at random moments, resume it each time, and audit what came out.

    python tools/kill_run.py --kills 10 --folder /tmp/kills

It ends with exit code 1 when a group was trained twice, or the ledger says other than the last checkpoint.
"""

import argparse
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from penstock.buffer.durable_log import FOLDER, LEDGER
from penstock.buffer.ledger import LedgerCounts, rows_of
from penstock.buffer.spans import numbers_of
from penstock.orchestration.checkpoints import checkpoints_of, read_progress

SETTINGS = ["run.checkpoint_every=10", "run.journal=true", "observe.view=plain", "run.name=killed"]
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
GROUPS_PER_STEP = 16
"""Of the demo."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng, run = random.Random(options.seed), options.folder / "killed"
    steps = [f"run.steps={options.steps}", f"run.folder={options.folder}"]
    command = ["train", *SETTINGS, *steps]
    for kill in range(options.kills):
        step = play_and_kill(command, run, rng.uniform(0, 5))
        print(f"kill {kill + 1}: {step}", flush=True)
        command = ["resume", str(run)]
    subprocess.run([PENSTOCK, *command], check=False)
    complaints = audit(run, options.steps)
    print(
        "\n".join(complaints) or f"audit clean: {options.steps * GROUPS_PER_STEP} groups, each trained once"
    )
    sys.exit(1 if complaints else 0)


def play_and_kill(command: list[str], run: Path, after_s: float) -> str:
    """The controller is killed this long after it has begun to train and there is a checkpoint."""
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    with (run.parent / "output.txt").open("ab") as output:
        process = subprocess.Popen([PENSTOCK, *command], stdout=output, stderr=output)
        while process.poll() is None and not (checkpoints_of(run) and metrics.stat().st_size > before):
            time.sleep(0.2)
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = list(checkpoints_of(run))
    return f"after {after_s:.1f} s of training; checkpoints of steps {found}"


def audit(run: Path, steps: int) -> list[str]:
    """What is wrong; nothing when every group was trained once."""
    step, checkpoint = list(checkpoints_of(run).items())[-1]
    consumed = numbers_of(read_progress(checkpoint).consumed)
    counts, ledger = LedgerCounts(run / FOLDER / LEDGER), run / FOLDER / LEDGER
    trained = {row[0] for row in rows_of(ledger) if row[2] == "trained"}
    complaints = []
    if step != steps:
        complaints.append(f"the last checkpoint is of step {step}, not {steps}")
    if len(consumed) != step * GROUPS_PER_STEP:
        complaints.append(f"{len(consumed)} groups were consumed in {step} steps of {GROUPS_PER_STEP}")
    if counts.states["trained"] != len(consumed) or not trained <= consumed:
        complaints.append(
            f"the ledger has {counts.states['trained']} groups trained, the checkpoint {len(consumed)}"
        )
    return complaints


if __name__ == "__main__":
    main()
