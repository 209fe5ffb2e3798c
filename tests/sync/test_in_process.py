import pytest
import torch

from penstock.errors import DamagedBucket, PenstockError
from penstock.sync.in_process import STAGED_TRANSPORT, InProcessPublisher, InProcessStagingReceiver
from tests.sync.contract import TransportContract, make_tensors, publish


class TestInProcess(TransportContract):
    transport = "in_process"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestInProcessOfAGpu(TestInProcess):
    device = "cuda"


class TestInProcessStaged(TransportContract):
    transport = "in_process_staged"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestInProcessStagedOfAGpu(TestInProcessStaged):
    device = "cuda"


def test_staging_takes_a_copy_that_outlives_the_slot() -> None:
    source, live = make_tensors(0), make_tensors(1)
    exchange: dict[str, torch.Tensor] = {}
    publisher, receiver = (
        InProcessPublisher(source, exchange=exchange, transport=STAGED_TRANSPORT),
        InProcessStagingReceiver(exchange),
    )
    expected = source["embed"].clone()
    update = publish(publisher, 1, source)
    assert receiver.stages(update)
    staged = receiver.stage(update)
    publisher.release(1)
    source["embed"].zero_()
    for version in (2, 3):
        publisher.snapshot(version, source)
    receiver.load(staged, live)()
    assert torch.equal(live["embed"], expected)
    receiver.drop(staged)
    assert staged.held == []


def test_a_damaged_bucket_is_seen_before_anything_is_loaded() -> None:
    source = make_tensors(0)
    exchange: dict[str, torch.Tensor] = {}
    publisher, receiver = (
        InProcessPublisher(source, exchange=exchange, transport=STAGED_TRANSPORT),
        InProcessStagingReceiver(exchange),
    )
    update = publish(publisher, 1, source)
    exchange[update.buckets[0]][0] ^= 1
    with pytest.raises(DamagedBucket, match="version 1: bucket 0 arrived damaged"):
        receiver.stage(update)
    publisher.close()
    with pytest.raises(PenstockError, match="is gone"):
        receiver.stage(update)
