import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import PenstockError, UpdateAbandoned
from penstock.sync.meeting import Arrival, Go, Meeting, connect_store, open_store


class Place:
    """A store, and meetings at it: that of the sender and those of receivers, each with a connection of its own."""

    def __init__(self) -> None:
        self.store, self.place = open_store("127.0.0.1")
        self.cancelled = threading.Event()
        self.sender = Meeting(self.store, "m", self.cancelled)

    def receiver(self, cancelled: threading.Event | None = None) -> Meeting:
        return Meeting(connect_store(self.place), "m", cancelled or threading.Event())


@pytest.fixture
def place() -> Place:
    return Place()


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begins it; what this returns waits for its result or error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> Any:
        thread.join(timeout=30)
        assert not thread.is_alive()
        return results[0]

    return end


def test_the_sender_waits_for_as_many_as_the_first_announces(place: Place) -> None:
    arrivals = [Arrival(id=name, epoch=-1, device="cpu", receivers=2) for name in "ab"]
    gathered = in_thread(place.sender.gather)
    answers = [in_thread(lambda one=one: place.receiver().arrive(one)) for one in arrivals]  # type: ignore[misc]
    assert sorted(arrival.id for arrival in gathered()) == ["a", "b"]
    decision = Go(3, "gloo", {"a": 1, "b": 2})
    place.sender.go(decision)
    assert [answer() for answer in answers] == [decision, decision]
    place.sender.forget()
    assert not any(place.store.check([f"m/{key}"]) for key in ("count", "go", "arrival/1", "arrival/2"))


def test_whoever_fails_tells_the_others_wherever_they_wait(place: Place) -> None:
    waiting = in_thread(lambda: place.receiver().arrive(Arrival("a", -1, "cpu", 2)))
    gathering = in_thread(place.sender.gather)
    transferring = in_thread(lambda: place.receiver().until(lambda: False))
    place.receiver().stop("engine b is out of memory")
    for error in (waiting(), gathering(), transferring()):
        assert isinstance(error, UpdateAbandoned)
        assert str(error) == "the update was abandoned: engine b is out of memory"


def test_a_side_that_is_cancelled_waits_no_longer(place: Place) -> None:
    cancelled = threading.Event()
    waiting = in_thread(lambda: place.receiver(cancelled).arrive(Arrival("a", -1, "cpu", 2)))
    transferring = in_thread(lambda: place.receiver(cancelled).until(lambda: False))
    gathering = in_thread(place.sender.gather)
    cancelled.set()
    place.cancelled.set()
    for error in (waiting(), transferring(), gathering()):
        assert isinstance(error, UpdateAbandoned)
        assert str(error) == "the update was cancelled"


def test_a_trainer_that_is_gone_is_named() -> None:
    with pytest.raises(PenstockError, match="the trainer's store at nowhere can't be reached"):
        connect_store("nowhere")


def test_the_store_listens_on_one_address_alone(place: Place) -> None:
    """Every socket of this process that listens on its port is bound to the loopback."""
    port = f"{int(place.place.split(':')[1]):04X}"
    with open("/proc/net/tcp") as ipv4, open("/proc/net/tcp6") as ipv6:
        rows = [line.split() for line in [*ipv4, *ipv6]]
    listening = [row[1] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"]
    assert listening == [f"0100007F:{port}"]


def test_whatever_is_sent_to_the_store_costs_its_own_connection_alone(place: Place) -> None:
    """It knows no token, so it must bear anything: stray, half, oversized, and the same again."""
    host, _, port = place.place.rpartition(":")
    greeting = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")
    hostile = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        greeting[:3],
        greeting + b"\xff" * 9,
        greeting + b"\x01" + (2**62).to_bytes(8, "little") + b"x",
        (greeting + b"\x01") * 2,
    ]
    for data in hostile:
        with socket.create_connection((host, int(port))) as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.1)
            connection.recv(1024)
    arrival = Arrival(id="a", epoch=-1, device="cpu", receivers=1)
    answer = in_thread(lambda: place.receiver().arrive(arrival))
    assert place.sender.gather() == [arrival]
    place.sender.go(Go(0, "gloo", {"a": 1}))
    assert answer() == Go(0, "gloo", {"a": 1})
