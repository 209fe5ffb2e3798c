from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from penstock.errors import ConfigError, UserError
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged
from penstock.sync.filesystem import FilesystemPublisher, FilesystemReceiver
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import (
    TRANSPORTS,
    AnyReceiver,
    Rendezvous,
    Transport,
    check_for_run,
    choose_transport,
    make_publisher,
    transport_of,
)
from tests.sync.contract import load, publish


def test_an_update_finds_its_receiver(tmp_path: Path) -> None:
    at = Rendezvous(tmp_path)
    receiver = AnyReceiver(at)
    for version, transport in enumerate(("shared_memory", "in_process", "in_process_staged")):
        source, live = {"a": torch.arange(5.0) + version}, {"a": torch.zeros(5)}
        publisher = make_publisher(transport, source, Publishing(slots=1), at)
        update = publish(publisher, version, source)
        assert receiver.stages(update) == (transport == "in_process_staged")
        staged = receiver.stage(update)
        assert not receiver.is_prepared(staged)
        receiver.load(staged, live)()
        receiver.drop(staged)
        assert torch.equal(live["a"], source["a"])
        publisher.close()
    with pytest.raises(ConfigError, match="must be one of shared_memory, cuda_ipc, .*, got 'pigeon'"):
        load(receiver, msgspec.structs.replace(update, transport="pigeon"), live)
    receiver.close()


def test_a_transport_says_what_it_holds() -> None:
    held = {name: (each.snapshots_on_gpu, each.staged_bytes(7)) for name, each in TRANSPORTS.items()}
    assert held == {
        "shared_memory": (False, 0),
        "cuda_ipc": (True, 0),
        "collective": (True, 7),
        "filesystem": (False, 7),
        "http": (False, 7),
        "in_process": (True, 0),
        "in_process_staged": (True, 7),
    }
    assert {each.staged_bytes(7, "delta") for each in TRANSPORTS.values()} == {7}


def test_a_run_refuses_what_stays_in_one_process() -> None:
    check_for_run("shared_memory")
    check_for_run("cuda_ipc")
    with pytest.raises(
        ConfigError,
        match="one of shared_memory, cuda_ipc, collective, filesystem, http, or the path of your own .*'pigeon'$",
    ):
        check_for_run("pigeon")
    with pytest.raises(ConfigError, match="got 'in_process', which needs trainer and engines in one process"):
        check_for_run("in_process")


class Pigeon(FilesystemPublisher):
    transport = "pigeon"


class PigeonLoft(FilesystemReceiver):
    """Counts what it has received."""

    num_staged: ClassVar[int] = 0

    def stage(self, update: WeightUpdate) -> Staged:
        PigeonLoft.num_staged += 1
        return super().stage(update)


PIGEON = Transport(
    needs="a loft", publisher=Pigeon, publisher_takes=("folder",), receiver=PigeonLoft, staged_copies=1
)


def test_a_transport_of_ones_own_is_found_by_its_path_on_both_sides(tmp_path: Path) -> None:
    path = f"{__name__}:PIGEON"
    source, live = {"a": torch.arange(5.0)}, {"a": torch.zeros(5)}
    publisher = make_publisher(path, source, Publishing(slots=1), Rendezvous(tmp_path))
    receiver = AnyReceiver(Rendezvous(tmp_path))
    update = publish(publisher, 1, source)
    assert update.transport == path
    load(receiver, update, live)
    assert torch.equal(live["a"], source["a"])
    assert PigeonLoft.num_staged == 1
    receiver.close()
    publisher.close()


def test_a_path_must_lead_to_a_transport() -> None:
    check_for_run(f"{__name__}:Pigeon")  # nothing is loaded yet
    with pytest.raises(UserError, match="the transport '.*:Pigeon' must be a .*Transport"):
        transport_of(f"{__name__}:Pigeon")


def test_broadcasts_outlive_a_member() -> None:
    assert transport_of("http").environment == {}
    assert transport_of("collective").environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


@pytest.mark.parametrize(
    ("sides", "chosen"),
    [
        ({"share_a_gpu": True}, "cuda_ipc"),
        ({}, "shared_memory"),
        ({"are_apart": True, "share_a_gpu": True}, "http"),
        ({"are_apart": True, "interface": "eth0"}, "collective"),
        ({"are_apart": True, "interface": "eth0", "folder": "/shared"}, "filesystem"),
    ],
)
def test_auto_is_the_fastest_that_works(sides: dict[str, Any], chosen: str) -> None:
    name, _ = choose_transport(**{"share_a_gpu": False, "are_apart": False, **sides})
    assert name == chosen
    transport = transport_of(name)
    assert transport.between_processes
    assert transport.between_machines or not sides.get("are_apart")
