"""A trainer and a sampler in one process: what every imposed schedule drives."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.learning.arms import Arm, Curve, Setup
from benchmarks.learning.routed_sampler import RoutedSampler
from benchmarks.learning.token_sampler import Answers, Sampler, Snapshots, Weights
from penstock.blob_stores import MemoryBlobs
from penstock.demo.arithmetic import make_tasks
from penstock.models.config import LoraConfig
from penstock.models.load import load_model
from penstock.models.published import published_tensors
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Group, SamplingParams, Score, ScoredGroup, StepPlan
from penstock.scoring.builtin_rewards import exact_match
from penstock.tasks.stream import TaskStream
from penstock.trainer.adapter import TrainedAdapter, adapter_tensors
from penstock.trainer.config import TrainerConfig
from penstock.trainer.policy_trainer import PolicyTrainer

MICRO_BATCH_TOKENS = 4096
ROUTING = ("routing_replayed", "routing_flipped", "routing_gap", "routing_gap_without")


class TestBed:
    """Trains plans, keeps old weights, samples with them, and keeps the books of one run."""

    __test__ = False

    def __init__(self, arm: Arm, seed: int, setup: Setup, *, keep: int) -> None:
        torch.set_num_threads(1)
        self._arm, self._seed, self._setup = arm, seed, setup
        model = load_model(setup.model)
        adapter = None
        if arm.lora is not None:
            torch.manual_seed(seed)
            adapter = TrainedAdapter(model, LoraConfig.model_validate(dict(arm.lora)), base=setup.model)
        tokenizer = ChatTokenizer(setup.model)
        self._snapshots = Snapshots(keep)
        self._blobs = MemoryBlobs()
        tensors = published_tensors if adapter is None else adapter_tensors
        self.sampler = self._open_sampler(model, tokenizer, tensors)
        config = TrainerConfig.model_validate(
            {
                "learning_rate": arm.learning_rate or setup.learning_rate,
                "warmup_steps": setup.warmup_steps,
                "schedule": setup.schedule,
                "max_grad_norm": setup.max_grad_norm,
                "micro_batch_tokens": MICRO_BATCH_TOKENS,
            }
        )
        self._trainer = PolicyTrainer(
            model,
            config=config,
            algorithm=arm.config(),
            total_steps=setup.steps,
            adapter=adapter,
            blobs=self._blobs,
        )
        self.stream = TaskStream(make_tasks("train", size=setup.num_tasks, seed=0), seed=seed)
        self._heldout = Answers.of(make_tasks("heldout", size=setup.num_heldout, seed=0), tokenizer)
        self._metrics: list[dict[str, float]] = []
        self._points: list[tuple[int, int, float]] = []
        self._samples = 0
        self._started = time.perf_counter()
        self.version = 0
        self._snapshots.add(0, self._trainer.weights())
        self.evaluate(0)

    def _open_sampler(
        self, model: nn.Module, tokenizer: ChatTokenizer, tensors: Callable[[nn.Module], Weights]
    ) -> Sampler:
        setup, routers = self._setup, self._arm.routers
        sampling = SamplingParams(max_tokens=setup.max_new_tokens, stop_token_ids=tokenizer.stop_token_ids)
        settings: dict[str, Any] = {
            "group_size": setup.group_size,
            "sampling": sampling,
            "tokenizer": tokenizer,
            "seed": self._seed,
            "tensors": tensors,
        }
        if routers is None:
            return Sampler(model, self._snapshots, **settings)
        blobs = self._blobs if routers.replays else None
        return RoutedSampler(model, self._snapshots, noise=routers.noise, blobs=blobs, **settings)

    @property
    def max_tokens(self) -> int:
        return self._setup.max_new_tokens

    def train(self, plan: StepPlan, tick: int) -> None:
        """One step, one new version, and a point on the curve when it is due."""
        self._metrics.append(self._trainer.step(plan).values())
        self._blobs.scopes.clear()
        self.version += 1
        self._snapshots.add(self.version, self._trainer.weights())
        self._samples += sum(len(group) for group in plan.scores)
        if self.version % self._setup.eval_every == 0 or self.version == self._setup.steps:
            self.evaluate(tick)

    def evaluate(self, tick: int) -> None:
        value = self.sampler.exact_reward(self._heldout, self.version)
        self._points.append((self._samples, tick, value))

    def curve(self, drops: dict[str, int] | None = None) -> Curve:
        samples, ticks, rewards = (list(column) for column in zip(*self._points, strict=True))
        gaps = [row["logprob_gap_max"] for row in self._metrics if "logprob_gap_max" in row]
        return Curve(
            arm=self._arm.name,
            seed=self._seed,
            samples=samples,
            ticks=ticks,
            rewards=rewards,
            staleness_mean=self._mean("staleness_mean"),
            staleness_max=max(row.get("staleness_max", 0.0) for row in self._metrics),
            ess_mean=self._mean("ess"),
            ess_min=min(row.get("ess", 1.0) for row in self._metrics),
            kl_mean=self._mean("kl"),
            clip_fraction=self._mean("clip_fraction"),
            masked_fraction=self._mean("masked_fraction"),
            logprob_gap_max=max(gaps, default=math.nan),
            drops=dict(drops or {}),
            routing={name: self._mean(name) for name in ROUTING if name in self._metrics[-1]},
            seconds=time.perf_counter() - self._started,
        )

    def _mean(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self._metrics) / len(self._metrics)


def scored(groups: Sequence[Group]) -> list[ScoredGroup]:
    """Groups with the built-in reward of each episode."""
    return [
        ScoredGroup(
            group=group,
            scores=tuple(Score(value=exact_match(group.task, episode.text)) for episode in group.episodes),
        )
        for group in groups
    ]
