"""Runs `penstock simulate`: a whole run in virtual time, with the controller that real runs have."""

import asyncio
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.engines.engine_pool import EnginePool
from penstock.loop.controller import Controller
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent, Drop, Span, StepEvent
from penstock.planner.config import SimulatedConfig
from penstock.planner.fluid_engine import FluidEngine
from penstock.planner.simulation import SimulatedScorer, SimulatedTokenizer, SimulatedTrainer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Message, Payload, StepPlan, StepResult, Task, WeightUpdate
from penstock.run.assembly import Parts, build_controller
from penstock.run.controller_events import ADMISSION, GENERATION, SCORING
from penstock.sync.transports import choose_transport, transport_of


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


def travel_of(config: SimulatedConfig) -> dict[str, Any]:
    """Return the fields of an update that say how the run's transport brings it to the engines: fetched while they
    generate, sent to all of them, or read in place."""
    sync, name = config.sync, config.sync.transport
    if name == "auto":
        are_apart = config.engine.num_first > config.simulation.engines_per_node
        name, _ = choose_transport(
            share_a_gpu=False,
            are_apart=are_apart or config.launcher.reaches_other_machines,
            folder=sync.folder,
            interface=sync.interface,
        )
    transport = transport_of(name)
    num_fetched = int(transport.staged_bytes(1, sync.selection) > 0)
    return {
        "transport": name,
        "buckets": ("simulated",) * num_fetched,
        "payloads": (Payload(num_bytes=0),) * num_fetched,
        "sends": transport.uses_nccl,
    }


class SimulatedRank(SimulatedTrainer):
    """Records the ages of a plan's tokens instead of keeping the plan. Its updates have the fields of `travel`."""

    def __init__(self, ages: Ages, travel: dict[str, Any], **durations: Any) -> None:
        super().__init__(**durations)
        self._ages = ages
        self._travel = travel

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        return msgspec.structs.replace(await super().publish(version, full=full), **self._travel)

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


class Findings:
    """Counts drops and what steps wait for, as a `penstock.observe.event_stream.Reader`."""

    def __init__(self, engine_seconds: Callable[[], tuple[float, float]]) -> None:
        """`engine_seconds` returns how long engines were busy so far, and how long paused, on average."""
        self.drops: Counter[str] = Counter()
        self._limits_s: defaultdict[str, float] = defaultdict(float)
        self._engine_seconds = engine_seconds
        self._before = engine_seconds()

    @property
    def limits(self) -> dict[str, float]:
        """Return each stage's share of the time in which it held up the next step, the largest first."""
        largest = sorted(self._limits_s.items(), key=lambda limit: -limit[1])
        return {stage: took_s / sum(self._limits_s.values()) for stage, took_s in largest}

    def on(self, event: AnyEvent) -> None:
        match event:
            case Drop():
                self.drops[event.reason] += 1
            case Span(name="wait for groups"):
                self._on_wait(event)
            case StepEvent():
                self._limits_s["trainer"] += event.took_s
                self._before = self._engine_seconds()

    def _on_wait(self, wait: Span) -> None:
        """Divide a wait of the trainer among the stages. Idle engines count as admission: they could generate
        more, but the bound admits no group until the slowest answers end."""
        if wait.time <= wait.start:
            return
        waits = {cause: float(wait.attributes.get(cause, 0.0)) for cause in (ADMISSION, GENERATION, SCORING)}
        share = waits[GENERATION] / (wait.time - wait.start)
        busy_s, stood_s = (
            share * (now - before) for now, before in zip(self._engine_seconds(), self._before, strict=True)
        )
        self._limits_s["engines"] += busy_s
        self._limits_s["admission"] += max(0.0, waits[GENERATION] - busy_s - stood_s)
        self._limits_s["scoring"] += waits[SCORING]
        # While a step waits, only new weights admit another group.
        self._limits_s["weight sync"] += stood_s + waits[ADMISSION]

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
    """Share of the engines' time with at least one sequence, without pauses for weights."""
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    transport: str
    """The transport that was simulated."""
    limits: dict[str, float]
    """Each stage's share of the time in which it held up the next step; the largest comes first."""
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
        self.pool = EnginePool(self._present, replaces=True, load_share=config.sync.load_share)

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

    def engine_seconds(self) -> tuple[float, float]:
        """Return how long engines were busy so far, and how long paused, on average."""
        count = self._config.engine.num_first
        busy_s = sum(engine.busy_s for engine in self.engines)
        return busy_s / count, sum(engine.stood_s for engine in self.engines) / count

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
    section, ages, travel = config.simulation, Ages(), travel_of(config)
    ranks = [
        SimulatedRank(
            ages,
            travel,
            step_s=lambda: section.step_s * rng.lognormal(sigma=section.step_spread),
            publish_s=lambda: 0.0,
        )
        for _ in range(section.ranks)
    ]

    async def main() -> tuple[SimulatedCluster, Findings, float, float, float]:
        loop = asyncio.get_running_loop()
        stream = EventStream(loop, defer=loop.call_soon)
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
        findings = Findings(cluster.engine_seconds)
        stream.subscribe("findings", findings)
        began, cpu = loop.time(), time.process_time()
        dying = asyncio.ensure_future(cluster.lose_nodes(controller))
        await controller.run()
        cpu_s = time.process_time() - cpu
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        stream.close()
        busy_s, _ = cluster.engine_seconds()
        return cluster, findings, busy_s, loop.time() - began, cpu_s

    cluster, findings, busy_s, took_s, cpu_s = run_in_virtual_time(main())
    groups = config.run.steps * config.rollout.groups_per_step
    return Outcome(
        engines=config.engine.num_first,
        ranks=section.ranks,
        steps=config.run.steps,
        groups=groups,
        hours=took_s / 3600,
        trainer_busy=max(rank.busy_s for rank in ranks) / took_s,
        engine_busy=busy_s / took_s,
        tokens_per_s=sum(engine.tokens for engine in cluster.engines) / took_s,
        staleness_mean=ages.mean,
        staleness_max=ages.max,
        transport=travel["transport"],
        limits=findings.limits,
        node_deaths=cluster.node_deaths,
        dropped=dict(findings.drops),
        controller_us_per_group=cpu_s / groups * 1e6,
    )
