import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from penstock.errors import PenstockError, UpdateAbandoned
from penstock.sync.meeting import Meeting, connect_store, open_store
from penstock.sync.private_group import (
    PrivateGroup,
    Transfer,
    bind_nccl,
    choose_backend,
    device_id,
    open_group,
)


def test_nccl_needs_a_gpu_of_its_own_for_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert choose_backend(["gpu-a", "gpu-b", "gpu-c"]) == "nccl"
    assert choose_backend(["gpu-a", "gpu-b", "gpu-a"]) == "gloo"
    assert choose_backend(["gpu-a", "cpu"]) == "gloo"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert choose_backend(["gpu-a", "gpu-b"]) == "gloo"
    assert device_id(torch.device("cpu")) == "cpu"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are looked up on Linux only")
@pytest.mark.parametrize(("interface", "name"), [("", "=lo"), ("127.0.0.1", "=lo"), ("eth0", "=eth0")])
def test_nccl_binds_the_named_interface_and_no_other(interface: str, name: str) -> None:
    environ = {"NCCL_SOCKET_IFNAME": "eth"}
    bind_nccl(interface, environ)
    assert environ == {"NCCL_SOCKET_IFNAME": name}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are looked up on Linux only")
def test_a_group_over_nccl_is_bound_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []

    class Nccl:
        class Options:
            _timeout = None

        def __init__(self, *arguments: object) -> None:
            bound.extend(
                os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
            )

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    _, place = open_store("127.0.0.1")
    PrivateGroup(place, epoch=0, rank=0, size=2, backend="nccl", address="127.0.0.1")
    assert bound == ["=lo", "0"]


def test_what_the_sender_has_reaches_the_others() -> None:
    store, place = open_store("127.0.0.1")
    received = torch.zeros(1000)

    def take_part(rank: int, data: torch.Tensor) -> None:
        meeting = Meeting(connect_store(place), "m", threading.Event())
        group = open_group(
            meeting,
            lambda: PrivateGroup(place, epoch=4, rank=rank, size=2, backend="gloo", address="127.0.0.1"),
        )
        group.broadcast(data).finish(meeting)
        group.close()

    other = threading.Thread(target=take_part, args=[1, received])
    other.start()
    take_part(0, torch.arange(1000.0))
    other.join(timeout=30)
    assert torch.equal(received, torch.arange(1000.0))
    del store


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_group_over_nccl_opens_sends_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one member: NCCL takes no second one on the same GPU. The next epoch makes another on the same store."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as a run sets it
    store, place = open_store("127.0.0.1")
    meeting = Meeting(store, "m", threading.Event())
    sent = torch.arange(1000.0, device="cuda")
    for epoch in (1, 2):
        group = open_group(
            meeting,
            lambda epoch=epoch: PrivateGroup(  # type: ignore[misc]
                place, epoch=epoch, rank=0, size=1, backend="nccl", address="127.0.0.1"
            ),
        )
        assert isinstance(group._group, dist.ProcessGroupNCCL)
        for _ in range(2):
            group.broadcast(sent).finish(meeting)
        group.close()
    torch.cuda.synchronize()
    assert torch.equal(sent.cpu(), torch.arange(1000.0))


def test_a_group_that_lacks_a_member_is_waited_for_until_somebody_says_stop() -> None:
    store, place = open_store("127.0.0.1")
    cancelled = threading.Event()
    meeting = Meeting(store, "m", cancelled)
    threading.Timer(0.0, cancelled.set).start()
    with pytest.raises(UpdateAbandoned, match="cancelled"):
        open_group(
            meeting,
            lambda: PrivateGroup(place, epoch=0, rank=0, size=2, backend="gloo", address="127.0.0.1"),
        )


class Work:
    """A transfer that has ended badly."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError(
            "Connection closed by peer [127.0.0.1]:5. This is typically caused by a crash. GLHF!"
        )


def test_an_error_is_cut_to_what_it_says_and_the_reason_of_another_comes_first() -> None:
    store, _ = open_store("127.0.0.1")
    meeting = Meeting(store, "m", threading.Event())
    with pytest.raises(PenstockError, match=r"weights failed: Connection closed by peer \[127\.0\.0\.1\]:5$"):
        Transfer(Work()).finish(meeting)
    meeting.stop("engine1 is gone")
    with pytest.raises(UpdateAbandoned, match="abandoned: engine1 is gone"):
        Transfer(Work()).finish(meeting)
