from pathlib import Path

import msgspec
import pytest
import torch

from penstock.errors import FingerprintMismatch, PenstockError
from penstock.records import WeightUpdate
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from penstock.sync.slot_publisher import Publishing
from penstock.vllm_plugin.staged_weights import check_arrival, whole_tensors

TENSORS = {"a": torch.arange(12.0).view(6, 2), "b": torch.ones(3)}


def published(folder: Path) -> WeightUpdate:
    publisher = SharedMemoryPublisher(TENSORS, Publishing(bucket_bytes=32), folder=folder)
    publisher.snapshot(1, TENSORS)
    return publisher.describe(1)


def test_tensors_come_together_from_several_buckets(tmp_path: Path) -> None:
    update = published(tmp_path)
    assert len(update.buckets) > 2
    staged = SharedMemoryReceiver().stage(update)
    tensors = whole_tensors(staged)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    check_arrival(staged, tensors)


def test_values_that_are_not_the_trainers_are_refused(tmp_path: Path) -> None:
    staged = SharedMemoryReceiver().stage(published(tmp_path))
    tensors = whole_tensors(staged)
    with pytest.raises(FingerprintMismatch, match="version 1: 1 of 2 tensors"):
        check_arrival(staged, {**tensors, "b": torch.zeros(3)})


def test_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    update = published(tmp_path)
    cut = msgspec.structs.replace(update, tensors=tuple(update.tensors[1:]))
    with pytest.raises(PenstockError, match="only parts of a"):
        whole_tensors(SharedMemoryReceiver().stage(cut))
