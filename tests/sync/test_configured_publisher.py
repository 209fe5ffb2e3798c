from pathlib import Path

import torch

from penstock.sync.config import SyncConfig
from penstock.sync.configured_publisher import open_publisher
from penstock.sync.transports import Rendezvous
from tests.sync.contract import publish


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
