"""A rank of `python -m benchmarks scale`: `python -m benchmarks.scale.rank_process SIZE RANK RANKS MEET FOLDER`.

{"do": "steps", "count": 3}       seconds of so many steps
{"do": "error"}                   how far its part of a gradient is from that of one process
{"do": "bytes"}                   what it holds before an update, and what one process would of weights and states
{"do": "publish", "version": 1}   a snapshot of its slices, described
{"do": "gather", "version": 2}    the same after a gather to the first rank, in buckets

Every answer also says what CPU time it took (`cpu_s`).
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.scale.live_bytes import live_bytes
from benchmarks.scale.scale_model import make_model, make_trainer, plans_of
from penstock.sync.bucket_layout import Slice
from penstock.sync.shared_memory import SharedMemoryPublisher
from penstock.sync.slot_publisher import Publishing
from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.local_shards import LocalShard, local_shard, local_shards
from penstock.trainer.parallel.process_ranks import ProcessRanks, join_ranks
from penstock.trainer.parallel.rank_layout import RankLayout, num_plans
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.worker.quiet import quieten

BUCKET_BYTES = 32 << 20


class Gradients:
    """Stands for an optimizer and keeps what it would have been updated with."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters as the model has them, and what this rank has of their gradients."""
        self._optimizer = trainer._optimizer
        trainer._optimizer = self  # type: ignore[assignment]

    def sum_gradients(self, ranks: Any) -> None:
        self._optimizer.sum_gradients(ranks)

    def gradient_norm(self, ranks: Any) -> float:
        pairs = zip(self._optimizer._sources, self._optimizer._masters, strict=True)
        self.own = [(source, master.grad.clone()) for source, master in pairs if master.grad is not None]
        return self._optimizer.gradient_norm(ranks)

    def update(self, learning_rate: float, norm: float) -> None:
        self._optimizer.forget()

    forget = update


class Rank:
    def __init__(self, size: str, ranks: ProcessRanks, folder: Path) -> None:
        self._size, self._ranks, self._folder = size, ranks, folder
        self._trainer = make_trainer(size, ranks)
        self._step = 0
        self._publishers: dict[str, SharedMemoryPublisher] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def steps(self, count: int) -> dict[str, float]:
        begin = time.perf_counter()
        for _ in range(count):
            self._step += 1
            plans = plans_of(self._size, self._step, num_plans(self._ranks.layout.parallel))
            self._trainer.step(plans[self._ranks.layout.plan])
        return {"seconds": time.perf_counter() - begin}

    def error(self) -> dict[str, float]:
        """The largest difference in any gradient, as a share of the tensor's largest value."""
        layout = self._ranks.layout
        alone, several = make_trainer(self._size, None), make_trainer(self._size, self._ranks)
        one, own = Gradients(alone), Gradients(several)
        alone.step(plans_of(self._size, 1, 1)[0])
        several.step(plans_of(self._size, 1, num_plans(layout.parallel))[layout.plan])
        worst = 0.0
        for (source, ours), (_, theirs) in zip(own.own, one.own, strict=True):
            shard = local_shard(source, layout)
            cut = tuple(slice(at, at + n) for at, n in zip(shard.start, ours.shape, strict=True))
            if ours.numel():
                worst = max(worst, float((ours - theirs[cut]).abs().max() / theirs.abs().max()))
        return {"error": worst}

    def bytes(self) -> dict[str, int]:
        """All that a step holds when its weights are about to be updated: parameters, gradients and AdamW's states,
        and whatever else was left, such as weights that were gathered and not given back."""
        optimizer: Any = self._trainer._optimizer
        update, held = optimizer.update, list[int]()

        def measured(learning_rate: float, norm: float) -> None:
            held.append(live_bytes(optimizer._sources, optimizer.state_dict()))
            update(learning_rate, norm)

        self.steps(1)  # states are made in the first update
        optimizer.update = measured
        self.steps(1)
        del optimizer.update
        whole = sum(parameter.numel() for parameter in make_model(self._size).parameters()) * 16
        return {"held": held[0], "whole": whole}

    def publish(self, version: int) -> dict[str, Any]:
        shards = self._trainer.trained.shards()
        return self._publish("own", version, shards, {name: s.values for name, s in shards.items()})

    def gather(self, version: int) -> dict[str, Any]:
        """All on the first rank first, then the same buckets from there."""
        gathered = self._gather()
        if self._ranks.layout.rank > 0:
            return {}
        return self._publish("whole", version, {}, gathered)

    def _publish(
        self, kind: str, version: int, shards: Mapping[str, LocalShard], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        if kind not in self._publishers:
            slices = {
                name: Slice(shard.shape, shard.start)
                for name, shard in shards.items()
                if tuple(shard.values.shape) != shard.shape
            }
            publishing = Publishing(slots=1, slices=slices, bucket_bytes=BUCKET_BYTES)
            self._publishers[kind] = SharedMemoryPublisher(tensors, publishing, folder=self._folder)
        publisher = self._publishers[kind]
        publisher.snapshot(version, tensors)
        update = publisher.describe(version)
        publisher.release(version)  # the bench reads it before the next
        return {"update": msgspec.to_builtins(update)}

    def _gather(self) -> dict[str, torch.Tensor]:
        """Bucket after bucket, each rank's slices in one message."""
        layout, group = self._ranks.layout, self._ranks.world.group
        shards = local_shards(dict(self._trainer._model.named_parameters()), layout)
        if layout.rank > 0:
            for bucket in _runs(shards):
                dist.send(torch.cat([shard.values.reshape(-1) for shard in bucket.values()]), 0, group=group)
            return {}
        if not self._whole:
            self._whole = {name: torch.empty(shard.shape) for name, shard in shards.items()}
        for name, shard in shards.items():
            self._whole[name][: shard.values.shape[0]] = shard.values
        for other in range(1, layout.size):
            for bucket in _runs(shards):
                rests = {name: self._whole[name][_rows(shard, other)] for name, shard in bucket.items()}
                flat = torch.empty(sum(rest.numel() for rest in rests.values()))
                dist.recv(flat, other, group=group)
                parts = torch.split(flat, [rest.numel() for rest in rests.values()])
                for rest, part in zip(rests.values(), parts, strict=True):
                    rest.copy_(part.view(rest.shape))
        return self._whole


def _rows(shard: LocalShard, rank: int) -> slice:
    size = -(-shard.shape[0] // 2)
    return slice(rank * size, (rank + 1) * size)


def _runs(shards: Mapping[str, LocalShard]) -> list[dict[str, LocalShard]]:
    """Of about a bucket each; the same on every rank."""
    runs: list[dict[str, LocalShard]] = [{}]
    size = 0
    for name, shard in shards.items():
        if runs[-1] and size + shard.values.nbytes > BUCKET_BYTES:
            runs.append({})
            size = 0
        runs[-1][name] = shard
        size += shard.values.nbytes
    return runs


def main() -> None:
    size, rank, num_ranks, meet, folder = sys.argv[1:]
    quieten()
    torch.set_num_threads(1)
    layout = RankLayout(parallel=ParallelConfig(shard=int(num_ranks)), rank=int(rank))
    worker = Rank(size, join_ranks(layout, meet, "cpu"), Path(folder))
    for line in sys.stdin:
        command, begin = json.loads(line), time.process_time()
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps({**answer, "cpu_s": time.process_time() - begin}), flush=True)


if __name__ == "__main__":
    main()
