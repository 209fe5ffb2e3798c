"""A whole run whose disk is full for a while: it stands still, goes on, and trains on every group once."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.crashes.crash_audit import audit
from benchmarks.crashes.crash_world import CrashWorld
from penstock.cli.samples import read_samples
from penstock.durability.durable_log import read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from tests.small_disk import enlarge, small_filesystem

pytestmark = pytest.mark.processes

FULL_FROM_S, FULL_UNTIL_S = 0.5, 200.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_filesystem(tmp_path / "disk", "900k") as disk:
        yield disk


class FullDiskWorld(CrashWorld):
    """Never crashes; its journal finds no room for 200 seconds."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.crashes = 5
        self.steps_while_full = 0

    async def _inline(self, write: Callable[[], None]) -> None:
        now = asyncio.get_running_loop().time()
        self.files.room = 0 if FULL_FROM_S < now < FULL_UNTIL_S else None
        if self.files.room == 0 and hasattr(self, "trainer"):
            self.steps_while_full = len(self.trainer.weights)
        await super()._inline(write)


@pytest.mark.parametrize("seed", range(12))
def test_it_waits_and_loses_nothing(seed: int, tmp_path: Path) -> None:
    world = FullDiskWorld(seed, tmp_path)
    world.play()
    audit(world)
    assert world.steps_while_full < 6, "it stood still"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_model_of_a_real_run_waits_for_room(tmp_path: Path) -> None:
    """The demo on a filesystem that has no room for its model: it says what it needs, and saves it when there is."""
    words = ["eval.tasks=null", "run.steps=2", "run.checkpoint_every=1", "run.journal=false"]
    code = "from penstock.cli import main; main()"
    with small_filesystem(tmp_path / "disk", "400k") as disk:
        command = [sys.executable, "-c", code, "train", *words, f"run.folder={disk}", "observe.view=plain"]
        lines = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if "the disk is full: the run waits" in line:
                    enlarge(disk)
        output = "".join(lines)
        assert process.returncode == 0, output
        said = [line for line in lines if "the disk is full" in line]
        assert len(said) == 1, output
        assert f"{disk / 'demo' / 'model'} can't be written: model.safetensors needs " in said[0]
        assert (
            f"if the model stays unsaved, penstock resume {disk / 'demo'} trains again from step 0" in said[0]
        )
        assert "the checkpoint of step 2 could not be written" in output
        assert (disk / "demo" / "model" / "model.safetensors").stat().st_size > 400_000
        summary = json.loads((disk / "demo" / "summary.json").read_text())
        assert "could not be written, the last of step 2: " in summary["failed_checkpoints"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_real_run_waits_and_loses_nothing(small_disk: Path) -> None:
    """The demo on a filesystem of 900 KiB, enlarged when the run says that it is full."""
    words = ["eval.tasks=null", "run.steps=12", "run.checkpoint_every=99", f"run.folder={small_disk}"]
    code = "from penstock.cli import main; main()"
    command = [sys.executable, "-c", code, "train", *words, "observe.view=plain"]
    full = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "the disk is full: the run waits" in line:
                full += 1
                enlarge(small_disk)
    output = "".join(lines)
    assert process.returncode == 0, output
    assert full == 1, output
    assert "the disk has room again: the run continues, and nothing was lost" in output
    run = small_disk / "demo"
    assert read_attempts(DiskFiles(run / "journal")).counts() == Counter(trained=12 * 16)
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 13))
    assert len(list(read_samples(run))) == 12 * 16 * 8
