import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch

from penstock.errors import PenstockError, UpdateAbandoned
from penstock.sync import bucket_server, http_transport
from penstock.sync.http_transport import HttpPublisher, HttpReceiver
from penstock.sync.slot_publisher import Publishing
from tests.sync.contract import Tensors, TransportContract, load, make_tensors, publish


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "RETRY_AFTER_S", (0.0, 0.0))


class TestHttp(TransportContract):
    transport = "http"

    def sent(self, name: str) -> torch.Tensor:
        return torch.frombuffer(self._served(name)[urlsplit(name).path], dtype=torch.uint8)

    def replace_sent(self, name: str, data: torch.Tensor) -> None:
        self._served(name)[urlsplit(name).path] = data.numpy().data

    def _served(self, name: str) -> dict[str, memoryview]:
        servers = [each._server for each in self.opened if isinstance(each, HttpPublisher)]
        return next(server._buckets for server in servers if name.startswith(server._url))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestHttpOfAGpu(TestHttp):
    device = "cuda"


@pytest.fixture
def world() -> Iterator[tuple[Tensors, HttpPublisher]]:
    source = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    publisher = HttpPublisher(source, Publishing(bucket_bytes=1000), token="secret")
    yield source, publisher
    publisher.close()


def test_a_wrong_token_is_refused(world: tuple[Tensors, HttpPublisher]) -> None:
    source, publisher = world
    with pytest.raises(PenstockError, match="version 1: bucket 0: the trainer answered 401 Unauthorized"):
        HttpReceiver(token="guess").stage(publish(publisher, 1, source))


class Flaky(bucket_server._Handler):
    """Cuts every connection after 700 bytes, so often."""

    cuts = 2

    def do_GET(self) -> None:
        if Flaky.cuts == 0:
            super().do_GET()
            return
        Flaky.cuts -= 1
        data = self.buckets[self.path]
        first = bucket_server._first_byte(self.headers.get("Range", ""))
        self._answer(bucket_server.HTTPStatus.OK, len(data) - first)
        self.wfile.write(data[first : first + 700])
        self.close_connection = True


def test_a_fetch_that_broke_off_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_server, "_Handler", Flaky)
    source, live = make_tensors(0), make_tensors(1)
    source["embed"] = torch.randn(500, 8)
    live["embed"] = torch.zeros(500, 8)
    publisher = HttpPublisher(source, token="secret")
    update = publish(publisher, 1, source)
    load(HttpReceiver(token="secret"), update, live)()
    assert torch.equal(live["embed"], source["embed"])
    assert Flaky.cuts == 0
    monkeypatch.setattr(Flaky, "cuts", 9)
    with pytest.raises(PenstockError, match=r"version 1: bucket 0 can't be fetched .* ended after 2100 of"):
        HttpReceiver(token="secret").stage(update)
    publisher.close()


class Silent(bucket_server._Handler):
    """Promises bytes, and never sends them."""

    asked, can_resume_after = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        self._answer(bucket_server.HTTPStatus.OK, len(self.buckets[self.path]))
        self.asked.set()
        self.can_resume_after.wait(30)


def test_a_fetch_that_waits_is_told_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_server, "_Handler", Silent)
    source = make_tensors(0)
    publisher, receiver = HttpPublisher(source, token="secret"), HttpReceiver(token="secret")
    update = publish(publisher, 1, source)
    threading.Thread(target=lambda: Silent.asked.wait(30) and receiver.cancel()).start()
    with pytest.raises(UpdateAbandoned, match="version 1: the update was cancelled"):
        receiver.stage(update)
    Silent.can_resume_after.set()
    publisher.close()


def test_a_trainer_that_is_gone_is_named(world: tuple[Tensors, HttpPublisher]) -> None:
    source, publisher = world
    update = publish(publisher, 1, source)
    publisher.close()
    sentence = (
        r"version 1: bucket 0 can't be fetched from the trainer at 127\.0\.0\.1:\d+: Connection.*filesystem"
    )
    with pytest.raises(PenstockError, match=sentence):
        HttpReceiver(token="secret").stage(update)
