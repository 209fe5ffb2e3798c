"""Runs `penstock simulate`: a whole run in virtual time, with the controller that real runs have."""

import asyncio
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engines.engine_pool import EnginePool
from penstock.loop.controller import Controller
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent, Drop
from penstock.planner.config import SimulatedConfig
from penstock.planner.fluid_engine import FluidEngine
from penstock.planner.simulation import SimulatedScorer, SimulatedTokenizer, SimulatedTrainer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Message, StepPlan, StepResult, Task
from penstock.run.assembly import Parts, build_controller


@dataclass(slots=True)
class Ages:
    """Counts the trained tokens by their age in steps."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, plan: StepPlan) -> None:
        for batch in plan.micro_batches:
            for sequence in batch:
                sample = sequence.sample
                versions, counts = np.unique(sample.versions[sample.loss_mask], return_counts=True)
                for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
                    self.counts[plan.ages[sequence.group][version]] += count

    @property
    def mean(self) -> float:
        return sum(age * count for age, count in self.counts.items()) / max(1, self.counts.total())

    @property
    def max(self) -> int:
        return max(self.counts, default=0)


class SimulatedRank(SimulatedTrainer):
    """Records the ages of a plan's tokens instead of keeping the plan."""

    def __init__(self, ages: Ages, **durations: Any) -> None:
        super().__init__(**durations)
        self._ages = ages

    async def step(self, plan: StepPlan) -> StepResult:
        result = await super().step(plan)
        self.plans.clear()
        self._ages.add(plan)
        return result


class Tasks:
    """Makes as many tasks as are requested."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._returned: list[Task] = []

    def next(self) -> Task:
        if self._returned:
            return self._returned.pop()
        self.num_taken += 1
        return Task(id=f"t{self.num_taken}", prompt=f"p{self.num_taken}")

    def put_back(self, task: Task) -> None:
        self._returned.append(task)

    def task(self, task_id: str) -> Task:
        return Task(id=task_id, prompt=f"p{task_id[1:]}")


class PromptTokenizer(SimulatedTokenizer):
    """Gives every task a prompt of its own, since the pool chooses engines by prompt."""

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        return [1 + zlib.crc32(str(prompt).encode()) % (2**31 - 2), 1]


class Drops:
    """Counts drops, as a `penstock.observe.event_stream.Reader`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, Drop):
            self.counts[event.reason] += 1

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    engines: int
    ranks: int
    steps: int
    groups: int
    hours: float
    trainer_busy: float
    """Share of the time in which the busiest rank computes."""
    engine_busy: float
    """Share of the engines' time with at least one sequence."""
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    node_deaths: int
    dropped: dict[str, int]
    controller_us_per_group: float
    """CPU time of this process: the controller's, and a little of the simulation's."""


class SimulatedCluster:
    """Keeps engines on nodes that die and are replaced."""

    def __init__(self, config: SimulatedConfig, rng: np.random.Generator) -> None:
        self._config = config
        self._rng = rng
        self.engines: list[FluidEngine] = []
        """All engines, dead ones included."""
        self.node_deaths = 0
        count, per_node = config.engine.num_first, config.simulation.engines_per_node
        names = [f"engine{number}" for number in range(count)]
        self.nodes = [names[first : first + per_node] for first in range(0, count, per_node)]
        self._present = {name: self._engine(name) for name in names}
        self.pool = EnginePool(self._present, replaces=True)

    def _engine(self, name: str) -> FluidEngine:
        section, rng = self._config.simulation, self._rng

        def token_s() -> float:
            is_straggler = rng.random() < section.straggler_share
            return section.token_s * (section.straggler_factor if is_straggler else 1.0)

        engine = FluidEngine(
            name,
            batch=section.batch,
            num_tokens=lambda: 1 + int(section.answer_tokens * rng.lognormal(sigma=section.answer_spread)),
            token_s=token_s,
            sync_s=section.sync_s,
        )
        self.engines.append(engine)
        return engine

    async def lose_nodes(self, controller: Controller) -> None:
        """Kill nodes at random, one by one, and replace them."""
        section = self._config.simulation
        if not section.node_life_h:
            return
        async with asyncio.TaskGroup() as replacing:
            while True:
                await asyncio.sleep(self._rng.exponential(section.node_life_h * 3600 / len(self.nodes)))
                names = self.nodes[self._rng.integers(len(self.nodes))]
                if all(name in self._present for name in names):
                    self.node_deaths += 1
                    replacing.create_task(self._replace(names, controller))

    async def _replace(self, names: list[str], controller: Controller) -> None:
        section = self._config.simulation
        dead = [self._present.pop(name) for name in names]
        for engine in dead:
            engine.stop()
        await asyncio.sleep(section.notice_s)
        for engine in dead:
            engine.notice()
            if engine.name in self.pool.names:
                self.pool.lose(engine.name)
        await asyncio.sleep(section.replace_s)
        for name in names:
            self._present[name] = self._engine(name)
            self.pool.enlist(name, self._present[name])
        await controller.republish()


def simulate(config: SimulatedConfig) -> Outcome:
    """Simulate a whole run. The outcome is deterministic but for the measured CPU time."""
    rng = np.random.default_rng(config.run.seed)
    section, ages, drops = config.simulation, Ages(), Drops()
    ranks = [
        SimulatedRank(
            ages,
            step_s=lambda: section.step_s * rng.lognormal(sigma=section.step_spread),
            publish_s=lambda: 0.0,
        )
        for _ in range(section.ranks)
    ]

    async def main() -> tuple[SimulatedCluster, float, float]:
        loop = asyncio.get_running_loop()
        stream = EventStream(loop, defer=loop.call_soon)
        stream.subscribe("drops", drops)
        cluster = SimulatedCluster(config, rng)
        parts = Parts(
            engines=cluster.pool,
            trainers=ranks,
            scorer=SimulatedScorer(
                score_s=lambda: section.score_s, value=lambda task, episode: float(episode.index % 2)
            ),
            tokenizer=PromptTokenizer(),
            tasks=Tasks(),
        )
        controller = build_controller(config, parts, events=stream)
        await controller.start()
        began, cpu = loop.time(), time.process_time()
        dying = asyncio.ensure_future(cluster.lose_nodes(controller))
        await controller.run()
        cpu_s = time.process_time() - cpu
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        stream.close()
        return cluster, loop.time() - began, cpu_s

    cluster, took_s, cpu_s = run_in_virtual_time(main())
    groups = config.run.steps * config.rollout.groups_per_step
    count = config.engine.num_first
    return Outcome(
        engines=count,
        ranks=section.ranks,
        steps=config.run.steps,
        groups=groups,
        hours=took_s / 3600,
        trainer_busy=max(rank.busy_s for rank in ranks) / took_s,
        engine_busy=sum(engine.busy_s for engine in cluster.engines) / (count * took_s),
        tokens_per_s=sum(engine.tokens for engine in cluster.engines) / took_s,
        staleness_mean=ages.mean,
        staleness_max=ages.max,
        node_deaths=cluster.node_deaths,
        dropped=dict(drops.counts),
        controller_us_per_group=cpu_s / groups * 1e6,
    )
