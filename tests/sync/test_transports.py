from pathlib import Path

import msgspec
import pytest
import torch

from penstock.sync.transports import AnyReceiver, make_publisher
from tests.sync.contract import load


def test_an_update_finds_its_receiver(tmp_path: Path) -> None:
    source, live = {"a": torch.arange(5.0)}, {"a": torch.zeros(5)}
    publisher = make_publisher("shared_memory", source, folder=tmp_path, slots=1)
    receiver = AnyReceiver()
    update = publisher.publish(1, source)
    load(receiver, update, live)()
    assert torch.equal(live["a"], source["a"])
    with pytest.raises(ValueError, match="one of shared_memory, cuda_ipc, got 'pigeon'"):
        load(receiver, msgspec.structs.replace(update, transport="pigeon"), live)()
    receiver.close()
    publisher.close()


def test_an_unknown_transport_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="sync.transport must be one of shared_memory, cuda_ipc, got 'pigeon'"
    ):
        make_publisher("pigeon", {}, folder=tmp_path, slots=1)
