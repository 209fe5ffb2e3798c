"""A run whose workers are tasks of this process, over real channels, and die when they are told to."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.channel import Channel, implement, serve
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.engines.config import EngineConfig
from penstock.engines.engine_start import START_ENGINE, EngineStart
from penstock.errors import ChannelClosed
from penstock.observe.readers import show
from penstock.observe.views import SilentView
from penstock.placement.automatic import resolve_auto
from penstock.placement.refusals import needed_capabilities
from penstock.planner.simulation import SimulatedEngine, SimulatedTokenizer, SimulatedTrainer
from penstock.processes.launchers import Worker
from penstock.records import (
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    Score,
    Task,
    UpdateReceipt,
    WeightUpdate,
)
from penstock.records.interfaces import Engine, Trainer
from penstock.rollout.rollout_process import START_ROLLOUT
from penstock.run import run_launchers
from penstock.run.preflight import Prepared
from penstock.run.run import Run
from penstock.run.summary import Summary
from penstock.scoring.scoring_process import (
    START_SCORING,
    ScoringProcess,
    ScoringReady,
    ScoringRequest,
    ScoringStart,
    Verdict,
)
from penstock.trainer.plan_transfer import serve_trainer
from penstock.trainer.trainer_start import START_TRAINER, TrainerReady, TrainerStart
from tests.processes.launchers.task_launcher import InProcessLauncher

LONGEST_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """`victim` dies when a worker comes to a point of its work, so many times."""

    victim: str
    who: str
    where: str
    times: int = 1


class ScriptedWorkers:
    """What every worker of the run does."""

    def __init__(self, *kills: Kill, faults: Mapping[str, Exception] | None = None) -> None:
        """`faults` are what workers answer their start with, by name."""
        self._left = Counter({kill: kill.times for kill in kills})
        self._faults = faults or {}
        self._channels: dict[str, Channel] = {}
        self.hang_at = ("", "")
        """Where a worker gets on no further."""
        self.hangs = asyncio.Event()
        self.launches: Counter[str] = Counter()
        self.points: list[tuple[str, str]] = []
        self.sequences: list[int] = []
        """How many each process of the engine was to compute at a time."""
        self.capabilities: tuple[str, ...] = ()
        self._answered: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._launched: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)

    async def launched(self, name: str, number: int) -> None:
        """Wait for a worker's process of this number, from 1."""
        await self._launched[name, number].wait()

    def launch(self, name: str) -> bool:
        """A process has come; whether it lives."""
        self.launches[name] += 1
        self._launched[name, self.launches[name]].set()
        return self._killed_at(name, "launch") is None

    async def at(self, who: str, where: str) -> None:
        """A worker has come to this point."""
        self.points.append((who, where))
        if (who, where) == self.hang_at:
            self.hangs.set()
            await asyncio.Event().wait()
        victim = self._killed_at(who, where)
        if victim is None:
            return
        if where == "last to load":
            await self._answered[victim].wait()
        await self._channels[victim].close()
        if victim == who:
            raise ChannelClosed("it was killed")
        if where == "last to load":
            await self.launched(victim, 2)

    def _killed_at(self, who: str, where: str) -> str | None:
        for kill, left in self._left.items():
            if (kill.who, kill.where) == (who, where) and left:
                self._left[kill] -= 1
                return kill.victim
        return None

    async def serve(self, name: str, channel: Channel) -> None:
        self._channels[name] = channel
        channel.serve(START_ENGINE, lambda start: self._be_engine(name, channel, start))
        channel.serve(START_TRAINER, lambda start: self._be_trainer(name, channel, start))
        channel.serve(START_ROLLOUT, lambda start: self._load(name))
        channel.serve(START_SCORING, lambda start: self._be_scorer(name, channel, start))
        await channel.run()

    async def _load(self, name: str) -> None:
        await self.at(name, "load")
        await self.at(name, "last to load")
        if name in self._faults:
            raise self._faults[name]
        self._answered[name].set()

    async def _be_engine(self, name: str, channel: Channel, start: EngineStart) -> EngineReport:
        self.sequences.append(EngineConfig.model_validate(start.config).embedded.max_batch)
        await self._load(name)
        engine = SimulatedEngine(num_tokens=lambda: 2, token_s=lambda: 0.0, update_s=lambda: 0.0)

        async def update(update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
            await self.at(name, "update")
            return await engine.update(update, interrupt)

        async def generate(request: GenerateRequest) -> AsyncIterator[Chunk]:
            await self.at(name, "generate")
            async for chunk in engine.generate(request):
                yield chunk

        async def report() -> EngineReport:
            return msgspec.structs.replace(await engine.report(), name=name, capabilities=self.capabilities)

        own = {"update": update, "generate": generate, "report": report}
        serve(Engine, implement(Engine, partial(getattr, engine), **own), channel)
        return await report()

    async def _be_trainer(self, name: str, channel: Channel, start: TrainerStart) -> TrainerReady:
        await self._load(name)
        trainer = SimulatedTrainer(step_s=lambda: 0.0, publish_s=lambda: 0.0)

        async def publish(version: int, *, full: bool = False) -> WeightUpdate:
            await self.at(name, "publish")
            return await trainer.publish(version)

        async def release(version: int, *, delivered: bool = True) -> None:
            pass

        async def save(folder: str) -> None:
            await self.at(name, "save")

        own = {"publish": publish, "release": release, "save": save}
        serve_trainer(implement(Trainer, partial(getattr, trainer), **own), channel)
        return TrainerReady(num_parameters=1)

    async def _be_scorer(self, name: str, channel: Channel, start: ScoringStart) -> ScoringReady:
        await self._load(name)

        async def score(requests: tuple[ScoringRequest, ...]) -> tuple[Verdict, ...]:
            return tuple(
                Verdict(scores=tuple(Score(value=float(e.index)) for e in request.episodes))
                for request in requests
            )

        serve(ScoringProcess, implement(ScoringProcess, {"score": score}.__getitem__), channel)
        return ScoringReady(needs_group=False, concurrency=4)


class ScriptedLauncher(InProcessLauncher):
    def __init__(self, workers: ScriptedWorkers) -> None:
        super().__init__(workers.serve)
        self._scripted = workers

    async def launch(self, name: str, **options: Any) -> Worker:
        worker = await super().launch(name, **options)
        if not self._scripted.launch(name):
            await worker.kill()
            self.forget(worker)
            raise await worker.died()
        return worker


class ScriptedRun:
    """A run of three steps with one engine and one scorer, unless settings say otherwise."""

    def __init__(
        self, folder: Path, workers: ScriptedWorkers, patch: pytest.MonkeyPatch, **settings: Any
    ) -> None:
        sections: dict[str, Any] = {
            "run": {"steps": 3, "checkpoint_every": 2, **settings.pop("run", {})},
            "rollout": {"groups_per_step": 2, "group_size": 2},
            "reward": {"functions": ["penstock.bench.workload:reward"], "workers": 1},
            "algorithm": {"selection": {}},
            "eval": {"tasks": {}},
        }
        config = resolve_auto(build(PenstockConfig, sections | settings)).config
        workers.capabilities = tuple(needed_capabilities(config))
        patch.setattr(run_launchers, "open_launcher", lambda *_, **__: ScriptedLauncher(workers))
        self.folder, self.view = folder, SilentView()
        prepared = Prepared(
            config=config,
            model="m",
            tokenizer=SimulatedTokenizer(),  # type: ignore[arg-type]
            tasks=[Task(id=str(number), prompt=str(number)) for number in range(50)],
            heldout=[Task(id="held out", prompt="1")],
            folder=folder,
            max_context=100,
        )
        self.controlled = Run(prepared, show(self.view))

    async def run(self) -> Summary:
        async with asyncio.timeout(LONGEST_S):
            return await self.controlled.run()
