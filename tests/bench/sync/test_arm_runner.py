from pathlib import Path

import pytest
import torch

from penstock.bench.sync.arm_runner import place_of, serving_of
from penstock.bench.sync.publication_source import Poked
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.sync.slot_publisher import Publishing

HERE, THERE = Path("/"), Path("elsewhere")


def test_buckets_are_in_memory_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Poked({"a": torch.zeros(100)}, Publishing())
    shared = UpdateArm(transport="shared_memory")
    assert place_of(shared, source, HERE, THERE) == HERE
    assert place_of(UpdateArm(transport="filesystem"), source, HERE, THERE) == THERE
    full = type("Usage", (), {"free": 1200})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: full)
    assert place_of(shared, source, HERE, THERE) == THERE


def test_an_engine_has_room_for_the_largest_adapter() -> None:
    effort = Effort(shape="7b", device="cuda", updates=1)
    full = UpdateArm(transport="cuda_ipc", batch=64)
    adapters = [UpdateArm(transport="cuda_ipc", selection="adapter", rank=rank, batch=64) for rank in (8, 32)]
    serving = serving_of([full, *adapters], effort, "7b")
    assert (serving.batch, serving.rank, serving.context, serving.threads) == (64, 32, 1024, 0)
    assert serving_of([full], effort, "7b").rank == 0
