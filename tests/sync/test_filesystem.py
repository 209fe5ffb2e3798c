import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from penstock.errors import DamagedBucket, PenstockError, UpdateAbandoned, UserError
from penstock.records import WeightUpdate
from penstock.sync import filesystem
from penstock.sync.filesystem import FilesystemPublisher, FilesystemReceiver
from penstock.sync.slot_publisher import Publishing
from tests.sync.contract import TransportContract, cut_file, load, make_tensors, publish


class TestFilesystem(TransportContract):
    transport = "filesystem"

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filesystem, "TIMEOUT_S", 0.0)

    def sent(self, name: str) -> torch.Tensor:
        """What follows the header, in the file itself."""
        size = os.path.getsize(name)
        file = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        return file[8 + int(file[:8].view(torch.int64)) :]

    @contextmanager
    def cut(self, update: WeightUpdate) -> Iterator[WeightUpdate]:
        with cut_file(Path(update.buckets[0])):
            yield update


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestFilesystemOfAGpu(TestFilesystem):
    device = "cuda"


def test_files_go_when_every_engine_has_their_version(tmp_path: Path) -> None:
    source = make_tensors(0)
    publisher = FilesystemPublisher(source, Publishing(bucket_bytes=600), folder=tmp_path)
    for version in (1, 2):
        update = publish(publisher, version, source)
        assert sorted(map(str, tmp_path.rglob("*.*"))) == sorted(update.buckets)
        publisher.release(version)
        assert list(tmp_path.rglob("*.*")) == []
    publisher.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("selection", ["full", "delta"])
def test_a_version_that_is_described_again_takes_no_more_room(tmp_path: Path, selection: Any) -> None:
    source, live = make_tensors(0), make_tensors(1)
    publishing = Publishing(selection=selection, bucket_bytes=600)
    publisher = FilesystemPublisher(source, publishing, folder=tmp_path)
    receiver = FilesystemReceiver()
    load(receiver, publish(publisher, 1, source), live)()
    publisher.release(1)
    source["norm"] += 1
    publisher.snapshot(2, source)
    for full in (False, False, True, False):
        update = publisher.describe(2, full=full)
        assert sorted(map(str, tmp_path.rglob("*.*"))) == sorted(update.buckets)
    load(receiver, update, live)()
    assert torch.equal(live["norm"], source["norm"])
    publisher.release(2)
    assert list(tmp_path.rglob("*.*")) == []
    publisher.close()


def test_a_file_that_goes_while_it_is_opened_fails_the_transfer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tensors(0)
    publisher, receiver = FilesystemPublisher(source, folder=tmp_path), FilesystemReceiver()
    update = publish(publisher, 1, source)

    def open_late(path: Path, **options: Any) -> Any:
        publisher.describe(1)
        return safe_open(path, **options)

    monkeypatch.setattr(filesystem, "safe_open", open_late)
    with pytest.raises(PenstockError, match="version 1: bucket 0 can't be read"):
        receiver.stage(update)
    publisher.close()


def test_a_file_says_what_lies_where(tmp_path: Path) -> None:
    source = make_tensors(0)
    publisher = FilesystemPublisher(source, folder=tmp_path)
    update = publish(publisher, 1, source)
    with safe_open(update.buckets[0], framework="pt") as file:
        data, metadata = file.get_tensor("bucket"), file.metadata()
    norm = next(each for each in json.loads(metadata["tensors"]) if each["name"] == "norm")
    found = data[norm["offset"] : norm["offset"] + norm["num_bytes"]].view(torch.float32)
    assert torch.equal(found, source["norm"])
    assert json.loads(metadata["payload"])["encoding"] == "dense"
    publisher.close()


def test_a_file_that_was_cut_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    source, live = make_tensors(0), make_tensors(1)
    before = {name: tensor.clone() for name, tensor in live.items()}
    publisher, receiver = FilesystemPublisher(source, folder=tmp_path), FilesystemReceiver()
    update = publish(publisher, 1, source)
    path = Path(update.buckets[0])
    whole = path.read_bytes()
    for cut in (whole[:-10], whole[:20], b""):
        path.write_bytes(cut)
        with pytest.raises(DamagedBucket, match="version 1: bucket 0 was cut"):
            load(receiver, update, live)
    path.write_bytes(whole[:-10] + b"\1" * 10)
    with pytest.raises(DamagedBucket, match="version 1: bucket 0 arrived damaged"):
        load(receiver, update, live)
    assert all(torch.equal(live[name], before[name]) for name in live)
    path.write_bytes(whole)
    load(receiver, update, live)()
    assert torch.equal(live["norm"], source["norm"])
    publisher.close()


def test_a_file_that_shows_up_late_is_waited_for_unless_that_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, live = make_tensors(0), make_tensors(1)
    publisher, receiver = FilesystemPublisher(source, folder=tmp_path), FilesystemReceiver()
    update = publish(publisher, 1, source)
    path = Path(update.buckets[0])
    path.rename(path.with_suffix(".late"))

    class Subscription:
        def __init__(self, act: Any) -> None:
            self._act = act

        def wait(self, seconds: float) -> bool:
            return bool(self._act())

    with pytest.raises(UpdateAbandoned, match="cancelled"):
        receiver._fetch(update, 0, Subscription(lambda: True))  # type: ignore[arg-type]
    receiver._fetch(update, 0, Subscription(lambda: not path.with_suffix(".late").rename(path)))  # type: ignore[arg-type]
    load(receiver, update, live)()
    path.unlink()
    monkeypatch.setattr(filesystem, "TIMEOUT_S", 0.0)
    with pytest.raises(
        PenstockError, match="is not there; every engine must see sync.folder under the same path"
    ):
        load(receiver, update, live)
    publisher.close()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = make_tensors(0)
    publisher = FilesystemPublisher(source, folder=tmp_path)
    monkeypatch.setattr(filesystem, "save_file", full)
    with pytest.raises(UserError, match=r"the disk of sync\.folder is full"):
        publish(publisher, 1, source)
    publisher.close()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"sync\.folder must be a folder that can be written to, got .*/file/x"
    ):
        FilesystemPublisher(make_tensors(0), folder=tmp_path / "file" / "x")
