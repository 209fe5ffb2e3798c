"""Whole optimizer steps as a run makes them: groups with answers of all lengths, from plan to update.

The other arms of `penstock bench train` repeat one row. Here no two rows are alike, which is what a compiled
model, and a GPU that must not wait for its host, have to cope with.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from penstock.algorithms.config import AlgorithmConfig
from penstock.bench.shapes import make_shape
from penstock.trainer.config import TrainerConfig
from penstock.trainer.dummy_batch import dummy_turn
from penstock.trainer.packing import plan_step
from penstock.trainer.parallel.process_ranks import ProcessRanks
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.sharing import find_families
from penstock.types import Episode, Group, Score, ScoredGroup, StepPlan, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a step trains on. Lengths of answers are log-normal."""

    groups: int
    members: int
    prompt: tuple[int, int]
    """Shortest and longest, in tokens."""
    median: int
    longest: int
    micro_batch_tokens: int
    chunk_tokens: int


ON_GPU = Load(
    groups=32,
    members=8,
    prompt=(64, 256),
    median=256,
    longest=1024,
    micro_batch_tokens=16384,
    chunk_tokens=4096,
)
ON_CPU = Load(
    groups=3, members=2, prompt=(4, 12), median=12, longest=32, micro_batch_tokens=64, chunk_tokens=64
)


def steps_arm(
    shape: str,
    device: str,
    *,
    compiled: bool,
    steps: int,
    load: Load,
    parallel: ProcessRanks | None = None,
) -> dict[str, float]:
    """Steps on different groups, the first of them not counted. `parallel`: this process as the only rank."""
    is_split = parallel is not None and parallel.layout.is_sharded
    model: Any = make_shape(shape, "cpu" if is_split else device, torch.float32)
    config = TrainerConfig(
        dtype="bfloat16" if device != "cpu" else "float32",
        checkpointing="selective",
        compile="on" if compiled else "off",
        micro_batch_tokens=load.micro_batch_tokens,
        logprob_chunk_tokens=load.chunk_tokens,
    )
    plans = [make_plan(load, model.config.vocab_size, number + 1) for number in range(steps + 1)]
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    trainer = PolicyTrainer(
        model,
        config=config,
        algorithm=AlgorithmConfig(),
        total_steps=steps + 1,
        device=device,
        parallel=parallel,
    )
    begin = time.perf_counter()
    trainer.warm_up()
    warm_s = time.perf_counter() - begin
    graphs = counters["stats"]["unique_graphs"]
    trainer.step(plans[0])
    begin = time.perf_counter()
    results = [trainer.step(plan) for plan in plans[1:]]
    seconds = time.perf_counter() - begin
    tokens = sum(num_forward_tokens(plan) for plan in plans[1:])
    parts = ("prepare", "forward", "backward", "optimizer", "metrics")
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    return {
        "gradient_norm": results[-1].values()["grad_norm"],
        "peak_gb": peak / 1e9,
        "ms": seconds / steps * 1e3,
        "tokens": tokens / steps,
        "tokens_per_s": tokens / seconds,
        "micro_batches": float(len(plans[1].micro_batches)),
        "warm_up_s": warm_s,
        "compiled_since": float(counters["stats"]["unique_graphs"] - graphs),
        **{f"{part}_ms": sum(result.seconds[part] for result in results) / steps * 1e3 for part in parts},
    }


def make_plan(load: Load, vocabulary: int, number: int) -> StepPlan:
    (plan,) = make_plans(load, vocabulary, number)
    return plan


def make_plans(load: Load, vocabulary: int, number: int, ranks: int = 1) -> tuple[StepPlan, ...]:
    rng = np.random.default_rng(number)
    groups = [_group(load, vocabulary, rng, index) for index in range(load.groups)]
    return plan_step(
        number, groups, micro_batch_tokens=load.micro_batch_tokens, shared_prompts=True, ranks=ranks
    )


def num_forward_tokens(plan: StepPlan) -> int:
    """What runs through the model: the prompt of a group counts once in a micro-batch."""
    families = (
        family for micro_batch in plan.micro_batches for family in find_families(micro_batch, shared=True)
    )
    return sum(family.prefix + sum(family.rests) for family in families)


def _group(load: Load, vocabulary: int, rng: np.random.Generator, number: int) -> ScoredGroup:
    prompt = rng.integers(0, vocabulary, rng.integers(*load.prompt, endpoint=True))
    lengths = np.clip(np.exp(rng.normal(np.log(load.median), 0.9, load.members)), 1, load.longest).astype(int)
    turns = (dummy_turn(prompt, rng.integers(0, vocabulary, length), vocabulary) for length in lengths)
    episodes = tuple(Episode(task_id=str(number), turns=(turn,)) for turn in turns)
    scores = tuple(Score(value=float(value)) for value in rng.normal(size=load.members))
    task = Task(id=str(number), prompt="")
    return ScoredGroup(group=Group(number=number, task=task, episodes=episodes), scores=scores)
