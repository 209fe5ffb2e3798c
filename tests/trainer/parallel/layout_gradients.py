"""The gradient of a step on one rank of a layout, held against that of one process."""

import copy
import os
from pathlib import Path
from typing import Any

import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.models.config import LoraConfig
from penstock.records import ScoredGroup
from penstock.records.interfaces import BlobStore
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.parallel.local_shards import local_shard
from penstock.trainer.parallel.process_ranks import ProcessRanks, join_ranks, leave_ranks
from penstock.trainer.parallel.rank_layout import RankLayout, num_plans
from penstock.trainer.policy_trainer import PolicyTrainer, everything
from penstock.trainer.step.packing import plan_step
from tests.trainer.parallel.rank_processes import rank_device
from tests.trainer.test_policy_trainer import SGD

MICRO_BATCH = 30
Case = tuple[dict[str, Any], dict[str, Any]]
"""The algorithm section, and settings of the trainer."""


def join(rank: int, folder: Path, parallel: ParallelConfig) -> ProcessRanks:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    layout = RankLayout(parallel=parallel, rank=rank)
    number = len(list(folder.glob(f"joined-{rank}-*")))
    (folder / f"joined-{rank}-{number}").touch()
    return join_ranks(layout, f"file://{folder}/meet-{number}", rank_device(rank))


class Kept(SGD):
    """With the norm that clipping would use."""

    norm = 0.0

    def gradient_norm(self, ranks: Any = None) -> float:
        self.norm = super().gradient_norm(ranks)
        return self.norm

    def by_source(self) -> list[tuple[Any, torch.Tensor]]:
        """Parameters as the model has them, and what this rank has of their gradients."""
        own = self._optimizer
        pairs = zip(own._sources, own._masters, strict=True)
        return [(source, self.gradients[id(m)]) for source, m in pairs if id(m) in self.gradients]


def trained(
    model: Any,
    plan: Any,
    case: Case,
    ranks: ProcessRanks | None = None,
    device: str = "cpu",
    blobs: BlobStore | None = None,
) -> Kept:
    algorithm, config = case[0], dict(case[1])
    torch.manual_seed(0)  # value heads begin alike
    section = AlgorithmConfig(**algorithm)
    adapter = add_adapter(model, config.pop("lora")) if "lora" in config else None
    trainer = PolicyTrainer(
        model,
        config=TrainerConfig(logprob_gap_warning=1e3, **config),
        algorithm=section,
        total_steps=10,
        parallel=ranks,
        device=device,
        blobs=blobs,
        adapter=adapter,
        reference=copy.deepcopy(model) if section.needs_reference and adapter is None else None,
    )
    if trainer._filler is not None:  # as a warm-up does: nothing of it may be left
        everything(trainer._policy(trainer._filler)).backward()  # type: ignore[no-untyped-call]
        trainer._optimizer.forget()
    keeper = Kept(trainer)
    trainer.step(plan)
    return keeper


def add_adapter(model: Any, lora: dict[str, Any]) -> TrainedAdapter:
    """One that changes something: peft's begins with zeros."""
    adapter = TrainedAdapter(model, LoraConfig(**lora), base="base")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return adapter


def errors_on_rank(
    rank: int,
    folder: Path,
    layouts: list[dict[str, int]],
    model: Any,
    groups: list[ScoredGroup],
    cases: list[Case],
    blobs: BlobStore | None = None,
) -> dict[str, float]:
    """The largest error of this rank's part of any gradient, as a share of that tensor's largest value."""
    found: dict[str, float] = {}
    (plan,) = plan_step(1, groups, micro_batch_tokens=MICRO_BATCH, shared_prompts=True)
    alone = [trained(copy.deepcopy(model), plan, case, None, rank_device(rank), blobs) for case in cases]
    for sizes in layouts:
        parallel = ParallelConfig(**sizes)
        ranks = join(rank, folder, parallel)
        for case, one in zip(cases, alone, strict=True):
            found[f"{sizes} {case}"] = error_of(ranks, model, groups, case, one, blobs)
        leave_ranks()
    return found


def error_of(
    ranks: ProcessRanks,
    model: Any,
    groups: list[ScoredGroup],
    case: Case,
    one: Kept,
    blobs: BlobStore | None,
) -> float:
    layout = ranks.layout
    options = {"micro_batch_tokens": MICRO_BATCH, "shared_prompts": True}
    plans = plan_step(1, groups, ranks=num_plans(layout.parallel), **options)
    plan, device = plans[layout.plan], rank_device(layout.rank)
    several = trained(copy.deepcopy(model), plan, case, ranks, device, blobs)
    worst = abs(several.norm - one.norm) / one.norm
    assert one.norm > 0
    expected = [gradient for _, gradient in one.by_source()]
    for (source, ours), theirs in zip(several.by_source(), expected, strict=True):
        shard = local_shard(source, layout)
        cut = tuple(slice(at, at + size) for at, size in zip(shard.start, ours.shape, strict=True))
        assert shard.shape == tuple(theirs.shape)
        if ours.numel():
            error = (ours - theirs[cut]).abs().max() / theirs.abs().max()
            worst = max(worst, float(error))
    return worst
