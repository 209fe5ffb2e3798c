from pathlib import Path

import pytest
import torch

from penstock.errors import PenstockError
from penstock.records import AdapterSpec
from penstock.sync.config import SyncConfig
from penstock.sync.in_process import InProcessPublisher, InProcessReceiver
from penstock.sync.publishers import AdapterPublisher, open_publisher
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous
from tests.sync.contract import load, make_tensors, publish

SPEC = AdapterSpec(rank=2, alpha=4.0)


def make_adapter(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "head.lora_A.weight": torch.randn(2, 8, generator=generator),
        "head.lora_B.weight": torch.randn(3, 2, generator=generator),
    }


@pytest.fixture
def exchange() -> dict[str, torch.Tensor]:
    return {}


@pytest.fixture
def publisher(exchange: dict[str, torch.Tensor]) -> AdapterPublisher:
    full = Publishing(slots=1)
    part = Publishing(slots=2, selection="adapter", base=5, adapter=SPEC)
    return AdapterPublisher(
        lambda: InProcessPublisher(make_tensors(0), full, exchange=exchange),
        InProcessPublisher(make_adapter(0), part, exchange=exchange),
        base_version=5,
    )


def test_the_base_goes_once_and_its_buckets_with_it(
    publisher: AdapterPublisher, exchange: dict[str, torch.Tensor]
) -> None:
    source, live = make_tensors(0), make_tensors(1)
    receiver = InProcessReceiver(exchange)
    update = publish(publisher, 5, source)
    assert (update.selection, update.base, update.adapter) == ("full", None, None)
    load(receiver, update, live)()
    assert torch.equal(live["head"], source["head"])
    of_both = len(exchange)
    publisher.release(5)
    assert len(exchange) == of_both - len(update.buckets)
    with pytest.raises(PenstockError, match="gone"):
        receiver.stage(update)


def test_adapters_follow_on_top_of_the_base(
    publisher: AdapterPublisher, exchange: dict[str, torch.Tensor]
) -> None:
    publisher.snapshot(5, make_tensors(0))
    receiver, live = InProcessReceiver(exchange), make_adapter(9)
    for version in (6, 7, 8):
        adapter = make_adapter(version)
        update = publish(publisher, version, adapter)
        assert (update.version, update.selection, update.base) == (version, "adapter", 5)
        assert update.adapter == SPEC
        assert set(update.fingerprint) == set(adapter)
        load(receiver, update, live)()
        assert all(torch.equal(live[name], adapter[name]) for name in live)
        publisher.release(version)
        if version == 6:
            publisher.release(5)


def test_closing_frees_both(publisher: AdapterPublisher, exchange: dict[str, torch.Tensor]) -> None:
    publisher.close()
    publisher.close()
    assert exchange == {}


def test_the_base_can_be_sent_again_to_an_engine_that_joins_later(
    publisher: AdapterPublisher, exchange: dict[str, torch.Tensor]
) -> None:
    source, live = make_tensors(0), make_tensors(1)
    publish(publisher, 5, source)
    publisher.release(5)
    with pytest.raises(ValueError, match="version 5 has no snapshot"):
        publisher.describe(5)
    again = publish(publisher, 5, source)
    load(InProcessReceiver(exchange), again, live)()
    assert torch.equal(live["head"], source["head"])
    of_both = len(exchange)
    publisher.release(5)
    assert len(exchange) == of_both - len(again.buckets)


def test_the_section_decides_and_options_override_it(tmp_path: Path) -> None:
    section = SyncConfig(transport="shared_memory", selection="delta", anchor_every=2, bucket_mb=1, slots=1)
    source = {"w": torch.zeros(300, 1024)}
    publisher = open_publisher(section, source, Rendezvous(tmp_path), policy="critic")
    selections = []
    for version in (1, 2, 3):
        update = publish(publisher, version, source)
        publisher.release(version)
        selections.append(update.selection)
    publisher.close()
    assert selections == ["full", "delta", "full"]
    assert (update.policy, update.transport, len(update.buckets)) == ("critic", "shared_memory", 2)
    other = open_publisher(section, source, Rendezvous(tmp_path), selection="full", bucket_bytes=1 << 30)
    update = publish(other, 1, source)
    other.close()
    assert (update.selection, len(update.buckets)) == ("full", 1)
