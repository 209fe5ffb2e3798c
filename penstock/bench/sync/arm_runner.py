"""Runs the arms of `penstock bench sync`: a publisher in this process and an engine in another, or both in this
one where the transport needs that.

Consecutive arms that need the same engine share one, with rising versions.
"""

import itertools
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.bench.child import Child
from penstock.bench.shapes import make_shape, save_shape
from penstock.bench.sync.engine_beside import EngineBeside
from penstock.bench.sync.publication_source import Source, make_source
from penstock.bench.sync.serving_process import FIRST_VERSION, Serving
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.bench.sync.update_timing import measure
from penstock.models.published import published_tensors
from penstock.placement.shares import usable_cores
from penstock.processes.launchers.private_folder import PrivateFolder
from penstock.sync.transports import Rendezvous, make_publisher

CONTEXT, SMALL_CONTEXT, CONTEXT_7B = 2048, 64, 1024
"""The engine's context: on a GPU, on a CPU, and where the cache would not fit otherwise."""
SLOTS = 3
"""Most snapshots that a publisher has."""

Results = Iterator[tuple[str, dict[str, Any]]]


def measure_all(arms: Sequence[UpdateArm], effort: Effort) -> Results:
    """Yield the result of each arm by its name, as it ends. All engine processes start at once, since the start
    takes longest, and wait for their turn."""
    if effort.device == "cpu":
        torch.set_num_threads(num_threads())
    groups = [list(alike) for _, alike in itertools.groupby(arms, key=_engine_of)]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        saved = save_for_engines(effort, Path(folder))
        engines = [
            Engine(serving_of(group, effort, saved), beside=group[0].needs_one_process) for group in groups
        ]
        try:
            model = make_shape(effort.shape, effort.device, torch.bfloat16)
            for group, engine in zip(groups, engines, strict=True):
                engine.begin()
                for arm in group:
                    yield arm.name, engine.measure(arm, effort, model, Path(folder))
                engine.close()
        finally:
            for engine in engines:
                engine.close()


def _engine_of(arm: UpdateArm) -> tuple[object, ...]:
    """Return a key; consecutive arms with an equal key share an engine."""
    return arm.batch, arm.resume_kv, arm.needs_one_process


def num_threads() -> int:
    """Return the threads of the trainer, and of the engine: half of the cores each."""
    return max(1, usable_cores() // 2)


def save_for_engines(effort: Effort, folder: Path) -> str:
    """Return the model that engines load: on a CPU a folder, as in a run. A GPU makes random weights faster than
    it loads them, so there it is the shape."""
    if effort.device != "cpu":
        return effort.shape
    save_shape(effort.shape, folder / "model", effort.device)
    return str(folder / "model")


def serving_of(group: Sequence[UpdateArm], effort: Effort, model: str) -> Serving:
    on_gpu = effort.device != "cpu"
    ranks = [arm.rank for arm in group if arm.selection == "adapter"]
    context = CONTEXT_7B if effort.shape == "7b" else CONTEXT
    return Serving(
        model=model,
        device=effort.device,
        batch=group[0].batch,
        resume_kv=group[0].resume_kv,
        rank=max(ranks, default=0),
        context=context if on_gpu else SMALL_CONTEXT,
        threads=0 if on_gpu else num_threads(),
        staggered=not on_gpu,
    )


class Engine:
    """Controls the engine's side, and tracks its version and capabilities."""

    def __init__(self, serving: Serving, *, beside: bool = False) -> None:
        """With `beside`, the engine runs in this process."""
        self._token = secrets.token_hex(16)
        self._exchange: dict[str, torch.Tensor] = {}
        self._child = EngineBeside(serving, self._exchange) if beside else self._start(serving)
        self._capabilities: tuple[str, ...] = ()
        self._version = self._base = FIRST_VERSION

    def _start(self, serving: Serving) -> Child:
        words = [msgspec.json.encode(serving).decode()]
        child = Child("engine", "penstock.bench.sync.serving_process", words)
        child.tell(self._token.encode())
        return child

    def begin(self) -> None:
        """Let the engine begin to decode without end."""
        self._child.tell(b"go")
        self._capabilities = tuple(self._child.read()["capabilities"])
        self._child.read()

    def measure(self, arm: UpdateArm, effort: Effort, model: Any, folder: Path) -> dict[str, Any]:
        if f"interrupt:{arm.interrupt}" not in self._capabilities:
            return {"skipped": f"the engine has no interrupt:{arm.interrupt}"}
        weights: Mapping[str, torch.Tensor] = {
            name: tensor.detach() for name, tensor in published_tensors(model).items()
        }
        source = make_source(arm, model, weights, base=self._base)
        in_memory = PrivateFolder()
        place = place_of(arm, source, in_memory.path, folder)
        at = Rendezvous(folder=place, token=self._token, exchange=self._exchange)
        try:
            publisher = make_publisher(arm.transport, source.tensors, source.publishing, at)
            try:
                with working(arm.busy):
                    result = measure(arm, effort, publisher, self._child, source, self._version + 1)
            finally:
                publisher.close()
        finally:
            in_memory.remove()
        self._version += effort.num_updates(arm)
        if arm.selection != "adapter":
            self._base = self._version
        return result

    def close(self) -> None:
        self._child.close()


def place_of(arm: UpdateArm, source: Source, in_memory: Path, on_disk: Path) -> Path:
    """Return the folder for buckets that are files: in memory for `shared_memory`, as in a run, if there is
    room."""
    needed = SLOTS * sum(tensor.nbytes for tensor in source.tensors.values())
    has_room = shutil.disk_usage(in_memory).free > needed
    return in_memory if arm.transport == "shared_memory" and has_room else on_disk


@contextmanager
def working(busy: bool) -> Iterator[None]:
    """Keep the GPU busy with large matmuls while the block runs, if `busy`."""
    stop = threading.Event()

    def work() -> None:
        left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while not stop.is_set():
                for _ in range(20):
                    torch.mm(left, left)
                stream.synchronize()

    worker = threading.Thread(target=work)
    if busy:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        if busy:
            worker.join()


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1].encode(), type=list[UpdateArm])
    how_much = msgspec.json.decode(sys.argv[2].encode(), type=Effort)
    for found in measure_all(asked, how_much):
        print(msgspec.json.encode(found).decode(), flush=True)
