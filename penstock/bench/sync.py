"""`penstock bench sync`: what an update costs an engine, over shared memory and over CUDA IPC.

Two real processes. One publishes, as a trainer does; the other (`penstock.bench.sync_engine`) is the embedded
engine with a full batch that decodes. *Stall* is how long an update keeps the engine from computing. The
other times count from the beginning of the publication. *Told*: the engine's event loop has read the update.
*Fresh*: the first token has been sampled with the new weights. That includes the rest of the step that was running
and one whole step, so it depends on the engine's batch. *Seen*: a caller has such a token.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from penstock.bench.child import Child
from penstock.bench.shapes import hardware, make_shape
from penstock.interfaces import WeightPublisher
from penstock.models.load import resolve_device
from penstock.models.published import published_tensors
from penstock.orchestration.launchers.mps import mps
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher

WARMUP = 3
PAUSE_S, WINDOW_S, GOLDEN = 0.025, 0.05, 0.618034
"""Between updates the engine runs a few steps, as in a real run. Pauses are spread evenly over more than a window
of decode steps, so that updates meet a window at every point."""


class Setting(msgspec.Struct, frozen=True):
    """One arm: how weights travel, to an engine of which batch, and what the trainer does meanwhile."""

    transport: str
    batch: int
    busy: bool = False
    how: str = ""

    def engine(self) -> tuple[str, int]:
        """What the engine's process must know."""
        return self.transport, self.batch

    @property
    def name(self) -> str:
        parts = [self.transport.replace("_", " "), f"batch {self.batch}", self.how]
        return ", ".join([part for part in parts if part] + ["trainer busy"] * self.busy)


SLICED = [
    Setting("shared_memory", 64, how="time slices"),
    Setting("cuda_ipc", 512, how="time slices"),
    Setting("cuda_ipc", 512, busy=True, how="time slices"),
]
UNDER_MPS = [
    Setting("cuda_ipc", 512, how="MPS"),
    Setting("cuda_ipc", 512, busy=True, how="MPS"),
    Setting("cuda_ipc", 64, how="MPS"),
]


def run(json_path: Path | None = None, *, shape: str | None = None, updates: int = 40) -> dict[str, Any]:
    """On a GPU in time slices and under MPS, which is how a run shares a GPU; on a CPU in this process."""
    device = resolve_device("auto")
    shape = shape or ("tiny" if device == "cpu" else "1.5b")
    console = Console()
    if device == "cpu":
        arms = measure_all([Setting("shared_memory", 8)], shape, device, updates)
    else:
        arms = in_child(SLICED, shape, updates, {})
        with mps(os.environ, console.print) as daemon:
            if daemon is not None:
                arms |= in_child(UNDER_MPS, shape, updates, daemon.environment())
    report = {
        "headline": headline(arms),
        "hardware": hardware(device),
        "setting": {"shape": shape, "gb": arms_gb(arms), "updates": updates},
        "arms": arms,
    }
    console.print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def headline(arms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """At the batch of `bench engine` with the trainer idle: under MPS, or in time slices where there is none."""
    for how in ("MPS", "time slices"):
        idle = arms.get(Setting("cuda_ipc", 512, how=how).name)
        if idle is not None:
            return {"ipc_stall_ms": idle["stall_ms"], "ipc_fresh_ms": idle["fresh_ms"]}
    return {}


def arms_gb(arms: dict[str, dict[str, Any]]) -> float:
    return float(next(iter(arms.values()))["gb"])


def in_child(
    settings: "list[Setting]", shape: str, updates: int, environ: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Measure in a process of its own: a process becomes a client of MPS when it starts, or never."""
    words = [shape, str(updates), msgspec.json.encode(settings).decode()]
    child = subprocess.run(
        [sys.executable, "-m", "penstock.bench.sync", *words],
        stdout=subprocess.PIPE,
        env={**os.environ, **environ},
        check=True,
    )
    arms: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return arms


def measure_all(
    settings: "list[Setting]", shape: str, device: str, updates: int
) -> dict[str, dict[str, Any]]:
    """One engine process serves consecutive settings that differ only in what the trainer does. All processes start
    at once, since the start takes longest, and wait for their turn."""
    groups = [list(alike) for _, alike in itertools.groupby(settings, key=Setting.engine)]
    engines = [start_engine(group[0], shape, device) for group in groups]
    arms = {}
    try:
        model = make_shape(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
        weights = {name: tensor.detach() for name, tensor in published_tensors(model).items()}
        gb = sum(weight.numel() * weight.element_size() for weight in weights.values()) / 1e9
        for engine in engines:
            engine.read()  # it is ready
        for group, engine in zip(groups, engines, strict=True):
            for name, arm in measure_group(group, engine, weights, updates):
                arms[name] = {"gb": gb} | arm
                print(f"{name}: {told(arm)}", file=sys.stderr, flush=True)
            engine.close()
    finally:
        for engine in engines:
            engine.close()
    return arms


def measure_group(
    group: "list[Setting]", engine: Child, weights: dict[str, torch.Tensor], updates: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        publisher = make_publisher(group[0].transport, weights, Publishing(), Rendezvous(Path(folder)))
        engine.ask(b"go")  # decoding begins, and does not end
        try:
            for number, setting in enumerate(group):
                versions = range(number * (WARMUP + updates), (number + 1) * (WARMUP + updates))
                with working(setting.busy):
                    arm = measure(publisher, engine, versions, weights)
                yield setting.name, arm
        finally:
            publisher.close()


def told(arm: dict[str, Any]) -> str:
    return ", ".join(f"{name} {arm[f'{name}_ms']:.2f} ms" for name in ("stall", "fresh", "seen"))


def measure(
    publisher: WeightPublisher, engine: Child, versions: range, weights: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Medians over updates, after a few that open buckets and warm caches."""
    records = []
    for version in versions:
        next(iter(weights.values())).view(-1)[version] = float(version)
        records.append(publish(publisher, engine, version, weights))
        time.sleep(PAUSE_S + WINDOW_S * (version * GOLDEN % 1))
    kept = records[WARMUP:]
    return {key: statistics.median(record[key] for record in kept) for key in kept[0]} | {
        "stall_ms_max": max(record["stall_ms"] for record in kept)
    }


def publish(
    publisher: WeightPublisher, engine: Child, version: int, weights: dict[str, torch.Tensor]
) -> dict[str, float]:
    """One update, from its beginning to the first token on it that somebody has seen."""
    on_gpu = next(iter(weights.values())).is_cuda
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    begin = time.monotonic()
    publisher.snapshot(version, weights)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    copied = time.monotonic()
    update = publisher.describe(version)
    described = time.monotonic()
    answer = engine.ask(msgspec.json.encode(update))
    publisher.release(version)
    return {
        "stall_ms": answer["stall_ms"],
        "stage_ms": answer["stage_ms"],
        "verify_ms": answer["verify_ms"],
        "told_ms": (answer["told_at"] - begin) * 1e3,
        "fresh_ms": (answer["fresh_at"] - begin) * 1e3,
        "seen_ms": (answer["seen_at"] - begin) * 1e3,
        "snapshot_ms": (copied - begin) * 1e3,
        "describe_ms": (described - copied) * 1e3,
    }


def start_engine(setting: Setting, shape: str, device: str) -> Child:
    """The other process: one line in for an update, one line out when a token on it has been seen."""
    words = [shape, device, str(setting.batch)]
    return Child("engine", "penstock.bench.sync_engine", words)


@contextmanager
def working(busy: bool) -> Iterator[None]:
    """While inside, if `busy`, this process keeps the GPU busy with large matmuls."""
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


def table(report: dict[str, Any]) -> Table:
    title = f"{report['setting']['gb']:.3g} GB of weights, {report['hardware']['device']}, milliseconds"
    shown = Table("transport", "stall", "at most", "fresh", "seen", "snapshot", "hash", "told", title=title)
    columns = ("stall_ms", "stall_ms_max", "fresh_ms", "seen_ms", "snapshot_ms", "describe_ms", "told_ms")
    for name, arm in report["arms"].items():
        shown.add_row(name, *(f"{arm[column]:.2f}" for column in columns))
    return shown


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[3].encode(), type=list[Setting])
    print(json.dumps(measure_all(asked, sys.argv[1], resolve_device("auto"), int(sys.argv[2]))))
