"""Times the parts of an update, from the beginning of its publication to the first token that is seen.

    snapshot ─► describe (hash, pack) ─► transfer ─► stall ─► fresh ─► seen
    trainer                              engine

All parts but the snapshot run beside the trainer's next step, and all but the stall beside generation.
"""

import statistics
import time
from typing import Any

import msgspec
import torch

from penstock.bench.child import Child
from penstock.bench.sync.engine_beside import EngineBeside
from penstock.bench.sync.plain_copy import plain_copy_s
from penstock.bench.sync.publication_source import Source
from penstock.bench.sync.serving_process import COUNTED, Delivery
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.records import WeightUpdate
from penstock.records.interfaces import WeightPublisher

PAUSE_S, WINDOW_S, GOLDEN = 0.025, 0.05, 0.618034
"""Between updates the engine runs a few steps, as in a real run. Pauses are spread evenly over more than a
window of decode steps, so that updates meet a window at every point."""
WINDOW_STEPS = 8
"""Decode steps of a window on a GPU."""
COMPARED = ("snapshot", "describe", "transfer", "stall", "fresh")
"""Times that are compared with a plain copy."""


def measure(
    arm: UpdateArm,
    effort: Effort,
    publisher: WeightPublisher,
    engine: Child | EngineBeside,
    source: Source,
    first_version: int,
) -> dict[str, Any]:
    """Return medians over updates, after a few that open buckets and warm caches."""
    records: list[dict[str, float]] = []
    rate, window_s = 1.0, WINDOW_S
    for number in range(effort.num_updates(arm)):
        if number == effort.warmup:
            rate = tokens_per_s(engine, effort.rate_s)
            steps = WINDOW_STEPS if effort.device != "cpu" else 1
            window_s = max(WINDOW_S, steps * arm.batch / rate)
        version = first_version + number
        source.change(version)
        records.append(publish(arm, publisher, engine, source, version))
        time.sleep(PAUSE_S + window_s * (version * GOLDEN % 1))
    kept = records[effort.warmup :]
    result = {key: statistics.median(record[key] for record in kept) for key in kept[0]}
    result["stall_ms_max"] = max(record["stall_ms"] for record in kept)
    result["tokens_per_s"] = rate
    result["lost_ms"] = statistics.median(lost_s(record, rate) for record in kept) * 1e3
    return result | against_copy(result, effort.device)


def publish(
    arm: UpdateArm, publisher: WeightPublisher, engine: Child | EngineBeside, source: Source, version: int
) -> dict[str, float]:
    """Publish one update, and time it until a caller has seen a token that was sampled with it."""
    synchronize(source)
    begin = time.monotonic()
    publisher.snapshot(version, source.tensors)
    synchronize(source)
    copied = time.monotonic()
    update = publisher.describe(version)
    described = time.monotonic()
    delivery = Delivery(update=update, interrupt=arm.interrupt, drained=arm.drained)
    engine.tell(msgspec.json.encode(delivery))
    if update.sends:
        publisher.send(version)
    answer = engine.read()
    publisher.release(version)
    return {
        "bytes": update_bytes(update),
        "hashed_bytes": sum(spec.num_bytes for spec in update.tensors),
        "snapshot_ms": (copied - begin) * 1e3,
        "describe_ms": (described - copied) * 1e3,
        "transfer_ms": answer["stage_ms"],
        "stall_ms": answer["stall_ms"],
        "verify_ms": answer["verify_ms"],
        "told_ms": (answer["told_at"] - begin) * 1e3,
        "fresh_ms": (answer["fresh_at"] - begin) * 1e3,
        "seen_ms": (answer["seen_at"] - begin) * 1e3,
        "seconds": answer["at"],
        **{name: answer[name] for name in COUNTED},
    }


def lost_s(record: dict[str, float], rate: float) -> float:
    """Return how much longer the engine took, from the message to a new token, than its useful tokens take at
    this rate."""
    return max(0.0, record["seconds"] - (record["tokens"] - record["discarded_tokens"]) / rate)


def synchronize(source: Source) -> None:
    if next(iter(source.tensors.values())).is_cuda:
        torch.cuda.current_stream().synchronize()


def update_bytes(update: WeightUpdate) -> int:
    """Return the bytes that travel."""
    if update.payloads:
        return sum(payload.num_bytes for payload in update.payloads)
    return sum(spec.num_bytes for spec in update.tensors)


def tokens_per_s(engine: Child | EngineBeside, seconds: float) -> float:
    """Measure the rate while there are no updates."""
    before = engine.ask(b"")
    time.sleep(seconds)
    after = engine.ask(b"")
    return float(max(1.0, after["tokens"] - before["tokens"]) / (after["at"] - before["at"]))


def against_copy(result: dict[str, float], device: str) -> dict[str, Any]:
    """Return the time of a plain copy of as many bytes, how many such copies each part would have taken, and the
    rate of the hash, also as a share of that of a plain copy of the hashed bytes."""
    copy_ms = plain_copy_s(int(result["bytes"]), device) * 1e3
    compared: dict[str, Any] = {
        "copy_ms": copy_ms,
        "copies": {name: result[f"{name}_ms"] / copy_ms for name in COMPARED if f"{name}_ms" in result},
    }
    if result.get("verify_ms"):
        compared["hash_gb_per_s"] = result["hashed_bytes"] / 1e6 / result["verify_ms"]
        hashed_copy_ms = plain_copy_s(int(result["hashed_bytes"]), device) * 1e3
        compared["hash_vs_copy"] = hashed_copy_ms / result["verify_ms"]
    return compared
