"""A whole run in virtual time, whose engines and trainer are simulated: a test disturbs it and looks at the end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import RequestRefused
from penstock.observe.readers import show
from penstock.observe.views import SilentView
from penstock.placement.refusals import needed_capabilities
from penstock.planner.simulation import SimulatedEngine, SimulatedTokenizer, SimulatedTrainer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.trainer_group import TrainerGroup
from penstock.records import EngineReport, StepPlan, StepResult, Task, UpdateReceipt
from penstock.run import run as module
from penstock.run import run_launchers
from penstock.run.preflight import Prepared
from penstock.run.run import Run
from penstock.run.run_folder import SavedRun
from penstock.run.summary import Summary
from penstock.scoring.thread_scorer import MemoryScorer
from tests.processes.dying_worker import DyingWorker
from tests.trainer.trainer_starts import make_start

LONGEST_S = 200.0
"""Of virtual time: a run that would never end fails."""


class Engine(SimulatedEngine):
    name = "engine0"

    start = None

    def __init__(self, capabilities: tuple[str, ...]) -> None:
        super().__init__(num_tokens=lambda: 2, token_s=lambda: 0.1, update_s=lambda: 0.1)
        self.place, self.calls = DyingWorker(self.name), self
        self.frozen = False
        self.refuses = False
        self._capabilities = capabilities

    def lower_memory(self, say: object) -> None:
        """It never runs out of memory."""

    async def update(self, *arguments: Any) -> UpdateReceipt:
        await self._thaw()
        return await super().update(*arguments)

    async def report(self) -> EngineReport:
        await self._thaw()
        return msgspec.structs.replace(await super().report(), capabilities=self._capabilities)

    async def generate(self, request: Any) -> Any:
        if self.refuses:
            raise RequestRefused("its token ids must be in 0..99")
        async for chunk in super().generate(request):
            await self._thaw()
            yield chunk

    async def _thaw(self) -> None:
        if self.frozen:
            await asyncio.Event().wait()


class Trainer(SimulatedTrainer):
    """Has one slot, as a trainer whose engines are behind; saves after the step in progress."""

    start = make_start()

    def __init__(self) -> None:
        super().__init__(step_s=lambda: 1.0, publish_s=lambda: 0.0)
        self.place, self.calls, self.group = DyingWorker("trainer"), self, TrainerGroup([self])
        self.saved: list[str] = []
        self.num_steps = 0
        self._free = asyncio.Semaphore(2)
        self._busy = asyncio.Lock()

    async def step(self, plan: StepPlan) -> StepResult:
        return await asyncio.shield(asyncio.create_task(self._step(plan)))

    async def _step(self, plan: StepPlan) -> StepResult:
        async with self._busy:
            result = await super().step(plan)
            self.num_steps += 1
            await self._free.acquire()
            return result

    async def release(self, version: int, *, delivered: bool = True) -> None:
        if version:
            self._free.release()

    async def save(self, folder: str) -> None:
        async with self._busy:
            self.saved.append(folder)


class Launcher:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.blobs = self.folder = Path()

    async def __aenter__(self) -> "Launcher":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


class SimulatedRun:
    """One run, and the hands to disturb it with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        sections: dict[str, Any] = {
            "run": {"steps": 20},
            "rollout": {"groups_per_step": 2, "group_size": 2},
            "observe": {"watchdog_s": 30},
            "algorithm": {"selection": {}},
        }
        self.config = build(PenstockConfig, sections | settings)
        self.folder = folder
        self.saved: SavedRun | None = None
        self.view = SilentView()
        self.reward: Callable[..., Any] = lambda task, completion: float(len(completion))
        self.scorer = MemoryScorer(lambda task, completion: self.reward(task, completion))
        self._patch = monkeypatch
        self.others: tuple[type[Engine], ...] = ()
        self.trainer_kind = Trainer
        self.is_named = False
        """Whether its reward counts as one that the config names."""

    async def start(self, disturb: Callable[["SimulatedRun"], Any]) -> Summary:
        capabilities = tuple(needed_capabilities(self.config))
        self.engine = Engine(capabilities)
        self.trainer = self.trainer_kind()
        workers = SimpleNamespace(
            engines=(self.engine, *(kind(capabilities) for kind in self.others)),
            trainer=self.trainer,
            blobs=MemoryBlobs(),
            places=(self.trainer.place, self.engine.place),
            deaths={},
            another_engine=None,
            starts=(),
        )

        async def start_workers(*_: Any) -> Any:
            return workers

        self._patch.setattr(module, "start_workers", start_workers)
        self._patch.setattr(run_launchers, "open_launcher", Launcher)
        prepared = Prepared(
            config=self.config,
            model="m",
            tokenizer=SimulatedTokenizer(),  # type: ignore[arg-type]
            tasks=[Task(id=str(number), prompt=str(number)) for number in range(50)],
            heldout=[],
            folder=self.folder,
            max_context=100,
            saved=self.saved,
        )
        self.run = Run(prepared, show(self.view), scorer=self.scorer)
        if self.is_named:
            self._patch.setattr(Run, "_only_in_python", ())
        disturbing = asyncio.create_task(disturb(self))
        try:
            async with asyncio.timeout(LONGEST_S):
                return await self.run.run()
        finally:
            disturbing.cancel()

    def play(self, disturb: Callable[["SimulatedRun"], Any]) -> Summary:
        return run_in_virtual_time(self.start(disturb))

    async def after(self, steps: int) -> None:
        while self.trainer.num_steps < steps:  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.05)
