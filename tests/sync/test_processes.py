"""Engines in processes of their own, over each transport: they join late, die in the middle of an update, come again."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.records import WeightUpdate
from penstock.records.interfaces import WeightPublisher
from penstock.sync.fingerprint import fingerprints
from penstock.sync.joined_update import join_updates
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher
from tests.sync.contract import Tensors, make_tensors, publish

pytestmark = pytest.mark.processes

TIMEOUT_S = 30.0
"""A tenth of the time after which a broadcast gives up by itself."""


class Engine:
    """The other process."""

    def __init__(self, device: str) -> None:
        words = [sys.executable, "-m", "tests.sync.receiver_process", device, "secret"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer: Any = None

    def is_ready(self) -> None:
        assert self._out.readline() == "ready\n"

    def begin(self, update: WeightUpdate, *, dies: bool = False) -> None:
        line = json.dumps({"update": msgspec.to_builtins(update), "dies": dies})
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        line = self._out.readline()
        return dict(json.loads(line)) if line else {"died": self._process.wait()}

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._out.close()

    @property
    def _out(self) -> Any:
        return self._process.stdout


class Run:
    """A trainer in this process, and engines that are asked together."""

    def __init__(self, publisher: WeightPublisher, source: Tensors, device: str) -> None:
        self.publisher, self.source = publisher, source
        self.engines = [Engine(device) for _ in range(3)]
        self.version = 0

    def publish(self) -> WeightUpdate:
        self.version += 1
        self.source["norm"] += 1
        self.source["large"][self.version].normal_()
        return publish(self.publisher, self.version, self.source)

    def deliver(
        self, update: WeightUpdate, engines: list[Engine], *, dying: Engine | None = None
    ) -> list[dict[str, Any]]:
        """As a pool does: all at once, and where it is sent, with the trainer's part."""
        update = msgspec.structs.replace(update, receivers=len(engines))
        for engine in engines:
            engine.begin(update, dies=engine is dying)
        sending = threading.Thread(target=self._send, args=[update])
        sending.start()
        answers = [engine.end() for engine in engines]
        sending.join(timeout=TIMEOUT_S)
        assert not sending.is_alive()
        return answers

    def _send(self, update: WeightUpdate) -> None:
        self.failure: Exception | None = None
        try:
            if update.sends:
                self.publisher.send(update.version)
        except Exception as error:
            self.failure = error


@pytest.fixture(params=["shared_memory", "filesystem", "http", "collective", "cuda_ipc"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    device = "cuda" if request.param == "cuda_ipc" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("buckets are device memory")
    source = make_tensors(0, device) | {"large": torch.randn(16, 1 << 16, device=device)}
    publishing = Publishing(bucket_bytes=1 << 20, selection="delta", anchor_every=100)
    publisher = make_publisher(request.param, source, publishing, Rendezvous(tmp_path, token="secret"))
    run = Run(publisher, source, device)
    yield run
    for engine in run.engines:
        engine.close()
    publisher.close()


def test_engines_come_and_go_and_none_is_ever_half_updated(run: Run) -> None:
    first, second, late = run.engines
    for engine in run.engines:
        engine.is_ready()

    def check(answers: list[dict[str, Any]]) -> None:
        assert [answer["version"] for answer in answers] == [run.version] * len(answers)
        assert all(answer["sums"] == fingerprints(run.source) for answer in answers)
        run.publisher.release(run.version)

    for selection in ("full", "delta", "delta"):
        update = run.publish()
        assert update.selection == selection
        check(run.deliver(update, [first, second]))

    # One joins: it is brought to what the others serve, then takes deltas with them.
    (answer,) = run.deliver(run.publisher.describe(run.version, full=True), [late])
    assert answer["sums"] == fingerprints(run.source)
    check(run.deliver(run.publish(), [first, second, late]))

    # One dies in the middle. The others have the update, or were told and are as they were.
    before = fingerprints(run.source)
    run.source["large"].normal_()
    update = run.publish()
    assert len(update.buckets) == 5
    answers = run.deliver(update, [first, second, late], dying=second)
    assert answers[1] == {"died": 9}
    for answer in (answers[0], answers[2]):
        assert answer["took_s"] < TIMEOUT_S
        if update.sends:
            assert answer["error"] in ("UpdateAbandoned", "PenstockError")
            assert answer["sums"] == before
        else:
            assert answer["version"] == run.version
    assert (run.failure is not None) == update.sends

    # Those that are left go on, with that version or with the next.
    if update.sends:
        check(run.deliver(run.publisher.describe(run.version), [first, late]))
    else:
        run.publisher.release(run.version)
    check(run.deliver(run.publish(), [first, late]))


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "filesystem", "cuda_ipc"])
def test_slices_of_two_trainer_processes_add_up_in_an_engine(transport: str, tmp_path: Path) -> None:
    device = "cuda" if transport == "cuda_ipc" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("buckets are device memory")
    module = [sys.executable, "-m", "tests.sync.publisher_process"]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            words = [*module, transport, device, str(rank), str(tmp_path)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            ranks.append(stack.enter_context(subprocess.Popen(words, text=True, **pipes)))  # type: ignore[call-overload]
            stack.callback(ranks[-1].kill)
        engine = Engine(device)
        stack.callback(engine.close)
        engine.is_ready()
        for version in (1, 2, 3):
            for rank in ranks:
                rank.stdin.write(f"{version}\n")
                rank.stdin.flush()
            parts = [msgspec.json.decode(rank.stdout.readline(), type=WeightUpdate) for rank in ranks]
            engine.begin(join_updates(parts))
            answer = engine.end()
            assert answer["version"] == version
            assert answer["sums"] == fingerprints(make_tensors(version, device))
