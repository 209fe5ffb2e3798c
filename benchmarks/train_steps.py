"""Whole optimizer steps as a run makes them: groups with answers of all lengths, from plan to update.

The arms of `penstock bench train` repeat one row. Here no two rows are alike, which is what a compiled
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
from penstock.records import Episode, Group, Score, ScoredGroup, StepPlan, Task
from penstock.trainer.config import Gather, TrainerConfig
from penstock.trainer.forward.dummy_batch import dummy_turn
from penstock.trainer.parallel.process_ranks import ProcessRanks
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.packing import plan_step
from penstock.trainer.step.sharing import find_families


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


class SteppedTrainer:
    """A trainer that has compiled and made its first step: what it does from now on can be timed."""

    def __init__(
        self,
        model: Any,
        device: str,
        *,
        compiled: bool,
        load: Load,
        parallel: ProcessRanks | None = None,
        gather: Gather = "layer",
    ) -> None:
        """`parallel`: this process as the only rank."""
        self._load, self._device, self._vocabulary = load, device, model.config.vocab_size
        config = TrainerConfig(
            dtype="bfloat16" if device != "cpu" else "float32",
            checkpointing="selective",
            compile="on" if compiled else "off",
            micro_batch_tokens=load.micro_batch_tokens,
            logprob_chunk_tokens=load.chunk_tokens,
            gather=gather,
        )
        before = _allocated(device)
        self._trainer = PolicyTrainer(
            model,
            config=config,
            algorithm=AlgorithmConfig(),
            total_steps=1000,
            device=device,
            parallel=parallel,
        )
        begin = time.perf_counter()
        self._trainer.warm_up()
        self.warm_up_s = time.perf_counter() - begin
        self._trainer.step(make_plan(load, self._vocabulary, 1))
        self.held = _allocated(device) - before
        """What it keeps of the GPU between steps, in bytes."""

    def time(self, steps: range, *, others: int = 0) -> dict[str, float]:
        """Steps of these numbers, on different groups. `others` hold so much of the GPU meanwhile."""
        plans = [make_plan(self._load, self._vocabulary, number) for number in steps]
        if self._device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        graphs = counters["stats"]["unique_graphs"]
        begin = time.perf_counter()
        results = [self._trainer.step(plan) for plan in plans]
        seconds = time.perf_counter() - begin
        tokens = sum(num_forward_tokens(plan) for plan in plans)
        parts = ("prepare", "forward", "backward", "optimizer", "metrics")
        peak = torch.cuda.max_memory_allocated() - others if self._device != "cpu" else 0
        return {
            "gradient_norm": results[-1].values()["grad_norm"],
            "peak_gb": peak / 1e9,
            "ms": seconds / len(plans) * 1e3,
            "tokens": tokens / len(plans),
            "tokens_per_s": tokens / seconds,
            "micro_batches": float(len(plans[0].micro_batches)),
            "warm_up_s": self.warm_up_s,
            "compiled_since": float(counters["stats"]["unique_graphs"] - graphs),
            **{
                f"{part}_ms": sum(result.seconds[part] for result in results) / len(plans) * 1e3
                for part in parts
            },
        }


def steps_arm(shape: str, device: str, *, compiled: bool, steps: int, load: Load) -> dict[str, float]:
    """Steps of a model of this shape on different groups, the first of them not counted."""
    trainer = SteppedTrainer(make_shape(shape, device, torch.float32), device, compiled=compiled, load=load)
    return trainer.time(range(2, steps + 2))


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device != "cpu" else 0


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
