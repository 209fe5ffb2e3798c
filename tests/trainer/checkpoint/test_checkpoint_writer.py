import json
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checksums import CHECKSUMS, Checksum, check_files
from penstock.errors import UserError
from penstock.trainer.checkpoint import host_copies
from penstock.trainer.checkpoint.checkpoint_state import CheckpointState, take_state
from penstock.trainer.checkpoint.checkpoint_writer import CheckpointRequest, CheckpointWriter
from penstock.trainer.checkpoint.host_copies import HostCopier
from penstock.trainer.checkpoint.state_files import load_state, write_state
from penstock.trainer.parallel.ranks import ThreadRanks


class Trainer:
    """One weight. Its writes wait until they may go on, and fail when told to."""

    def __init__(self) -> None:
        self.weight = torch.zeros(2)
        self.may_write = threading.Event()
        self.may_write.set()
        self.error: Exception | None = None
        self.num_configs = 0
        self.wrote_in: list[str] = []
        self._copier = HostCopier()

    @property
    def trained(self) -> "Trainer":
        return self

    def checkpoint_state(self) -> CheckpointState:
        return take_state(self._copier, {"master": self.weight}, {"w": self.weight})

    def write_config(self, folder: Path) -> None:
        self.num_configs += 1
        (folder / "code").mkdir()
        (folder / "code" / "model.py").write_text("pass")

    def write_state(self, folder: Path, state: CheckpointState) -> dict[Path, Checksum]:
        return write_state(folder, state.plain, state.tensors)

    def gather(self, own: Any) -> Any:
        return own

    def write_weights(self, folder: Path, weights: Any) -> dict[Path, Checksum]:
        assert self.may_write.wait(30)
        self.wrote_in.append(threading.current_thread().name)
        (folder / "weights").write_text(str(weights["w"].tolist()))
        if self.error is not None:
            raise self.error
        return {}


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def writer(trainer: Trainer, lines: list[str]) -> CheckpointWriter:
    return CheckpointWriter(
        trainer, lambda folder: (folder / "tokenizer.json").write_text("tokens") and None, lines.append
    )


def request(run: Path, step: int, *old: int) -> CheckpointRequest:
    return CheckpointRequest(
        folder=str(run / f"step-{step}"),
        files={"progress.json": b"{}"},
        remove=tuple(str(run / f"step-{one}") for one in old),
    )


def test_it_is_written_beside_steps_as_it_was(
    tmp_path: Path, trainer: Trainer, writer: CheckpointWriter
) -> None:
    trainer.may_write.clear()
    writer.begin(request(tmp_path, 2))
    writing = writer.written()
    assert not writing.done()
    assert not (tmp_path / "step-2").exists()
    trainer.may_write.set()
    written = writing.result()
    folder = tmp_path / "step-2"
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert found.keys() == {
        "checksums.json",
        "progress.json",
        "trainer/state.json",
        "trainer/tensors-0.safetensors",
        "model/weights",
        "model/tokenizer.json",
        "model/code/model.py",
    }
    assert written.num_bytes == sum(path.stat().st_size for path in found.values())
    check_files(folder)
    assert load_state(folder / "trainer")["master"].tolist() == [0.0, 0.0]
    assert trainer.wrote_in[0].startswith("checkpoint")


def test_latest_names_the_newest_and_older_ones_go_after_it(
    tmp_path: Path, trainer: Trainer, writer: CheckpointWriter
) -> None:
    for step, old in ((2, ()), (4, (2,))):
        trainer.weight.fill_(step)
        writer.begin(request(tmp_path, step, *old))
        writer.settle()
        assert (tmp_path / "latest").readlink() == Path(f"step-{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-4"]
    assert (tmp_path / "latest" / "model" / "weights").read_text() == "[4.0, 4.0]"
    assert trainer.num_configs == 1


def test_one_that_fails_leaves_the_one_before(
    tmp_path: Path, trainer: Trainer, writer: CheckpointWriter
) -> None:
    writer.begin(request(tmp_path, 2))
    writer.settle()
    trainer.error = OSError(28, "No space left on device")
    writer.begin(request(tmp_path, 4, 2))
    with pytest.raises(OSError, match="No space left"):
        writer.written().result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]
    assert (tmp_path / "latest").readlink() == Path("step-2")
    trainer.error = None
    writer.begin(request(tmp_path, 6, 2))
    assert writer.written().result().num_bytes > 0
    assert (tmp_path / "latest").readlink() == Path("step-6")


def test_the_next_one_waits_for_the_one_that_is_written(
    tmp_path: Path, trainer: Trainer, writer: CheckpointWriter
) -> None:
    trainer.may_write.clear()
    writer.begin(request(tmp_path, 2))
    timer = threading.Thread(target=trainer.may_write.set)
    timer.start()
    writer.begin(request(tmp_path, 4))
    assert (tmp_path / "step-2").exists()
    writer.settle()
    timer.join()


def test_without_room_for_copies_it_is_written_at_once(
    tmp_path: Path,
    trainer: Trainer,
    writer: CheckpointWriter,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "available_bytes", lambda: 1)
    for step in (2, 4):
        writer.begin(request(tmp_path, step))
        assert (tmp_path / f"step-{step}" / "model" / "weights").exists()
    (line,) = lines
    assert line.startswith("the host has no memory free for a copy of the trainer's state: training waits")


def test_nobody_waits_for_one_that_was_not_begun(writer: CheckpointWriter) -> None:
    writer.settle()
    with pytest.raises(ValueError, match="no checkpoint was begun"):
        writer.written()


def test_nothing_is_written_before_the_copies_are_made(
    tmp_path: Path, trainer: Trainer, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are made beside the next step."""
    order: list[str] = []
    write = trainer.write_state
    monkeypatch.setattr(CheckpointState, "wait", lambda state: order.append("copied"))
    monkeypatch.setattr(
        trainer, "write_state", lambda folder, state: order.append("written") or write(folder, state)
    )
    writer.begin(request(tmp_path, 2))
    writer.written().result()
    assert order == ["copied", "written"]


class OneRank(Trainer):
    """Writes `NUMBER.bin`, whose checksum it has from memory; the disk has another byte."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write_state(self, folder: Path, state: CheckpointState) -> dict[Path, Checksum]:
        path = folder / f"{self._number}.bin"
        path.write_bytes(bytes([self._number]))
        return {path: (1, f"{self._number:08x}")}


def test_every_rank_tells_the_checksums_of_what_it_wrote(tmp_path: Path) -> None:
    writers = [
        CheckpointWriter(OneRank(ranks.rank), lambda folder: None, ranks=ranks) for ranks in ThreadRanks.of(2)
    ]
    for writer in writers:
        writer.begin(request(tmp_path, 2))
    for writer in writers:
        writer.written().result(30)
    known = json.loads((tmp_path / "step-2" / CHECKSUMS).read_text())
    assert known["trainer/0.bin"] == [1, "00000000"]
    assert known["trainer/1.bin"] == [1, "00000001"]
    assert known["progress.json"] == [2, f"{zlib.crc32(b'{}'):08x}"]


def test_a_rank_without_room_leaves_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks one can't make a folder: both say so, and the checkpoint never gets its name."""
    make, calls = Path.mkdir, []

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "trainer":
            calls.append(path)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    writers = [CheckpointWriter(Trainer(), lambda folder: None, ranks=ranks) for ranks in ThreadRanks.of(2)]
    for writer in writers:
        writer.begin(request(tmp_path, 2))
    errors = [writer.written().exception(30) for writer in writers]
    assert sorted(str(error) for error in errors) == [
        "[Errno 28] No space left on device",
        "another rank could not write its part",
    ]
    assert {type(error) for error in errors} == {OSError, UserError}
    assert list(tmp_path.iterdir()) == []
