"""Starts the worker processes of a run and hands out what the controller needs of them."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.blobs import open_blobs
from penstock.engines.engine_client import EngineClient, EngineStart
from penstock.errors import ChannelClosed, ScoringFailed, WorkerDied
from penstock.interfaces import BlobStore
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.launchers.local import LocalLauncher, LocalWorker
from penstock.orchestration.placement import Environments, place_threads
from penstock.orchestration.preflight import Prepared
from penstock.scoring.scoring_client import ScoringClient, ScoringStart
from penstock.trainer.trainer_client import TrainerClient, TrainerStart
from penstock.types import Group, Score


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that a run can't do without, and the clients of each."""

    engines: tuple[EngineClient, ...]
    trainer: TrainerClient
    essential: tuple[LocalWorker, ...]
    blobs: BlobStore
    """The store that they share."""

    async def first_death(self) -> WorkerDied:
        """Wait until any of them ends, which none should."""
        watching = [asyncio.create_task(worker.died()) for worker in self.essential]
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in watching:
                task.cancel()


async def start_workers(
    launcher: LocalLauncher, prepared: Prepared, environments: Environments | None = None
) -> Workers:
    """All at once: the slowest to load decides how long it takes."""
    config = prepared.config
    environments = environments or Environments()
    threads = place_threads(
        cores=os.cpu_count() or 1,
        num_engines=config.engine.count,
        max_staleness=config.staleness.max_staleness,
        engine=config.engine.threads,
        trainer=config.trainer.threads,
    )
    async with asyncio.TaskGroup() as starting:
        training = starting.create_task(
            _start_trainer(launcher, prepared, threads.trainer, environments.trainer)
        )
        serving = [
            starting.create_task(
                _start_engine(launcher, prepared, f"engine{index}", threads.engine, environments.engine)
            )
            for index in range(config.engine.count)
        ]
    trainer_worker, trainer = training.result()
    engines = [task.result() for task in serving]
    return Workers(
        engines=tuple(engine for _, engine in engines),
        trainer=trainer,
        essential=(trainer_worker, *(worker for worker, _ in engines)),
        blobs=open_blobs(str(launcher.blobs)),
    )


async def _start_engine(
    launcher: LocalLauncher, prepared: Prepared, name: str, threads: int, environment: Mapping[str, str]
) -> tuple[LocalWorker, EngineClient]:
    worker = await launcher.launch(name, threads=threads, environment=environment)
    engine = EngineClient(worker.channel)
    section = prepared.config.engine
    if prepared.memory is not None:
        section = section.model_copy(update={"memory_share": prepared.memory.memory_share})
    start = EngineStart(
        name=name,
        model=prepared.model,
        device=prepared.config.model.device,
        threads=threads,
        config=section.model_dump(mode="json"),
        blobs=str(launcher.blobs),
    )
    await _or_death(worker, engine.start(start))
    return worker, engine


async def _start_trainer(
    launcher: LocalLauncher, prepared: Prepared, threads: int, environment: Mapping[str, str]
) -> tuple[LocalWorker, TrainerClient]:
    config = prepared.config
    worker = await launcher.launch("trainer", threads=threads, environment=environment)
    trainer = TrainerClient(worker.channel)
    start = TrainerStart(
        model=prepared.model,
        pad_token=config.model.pad_token,
        device=config.model.device,
        threads=threads,
        total_steps=config.run.steps,
        seed=config.run.seed,
        folder=str(launcher.folder),
        blobs=str(launcher.blobs),
        slots=config.sync.slots,
        transport=config.sync.transport,
        engine_dtype=config.engine.dtype,
        trainer=config.trainer.model_dump(mode="json"),
        algorithm=config.algorithm.model_dump(mode="json"),
    )
    await _or_death(worker, trainer.start(start))
    return worker, trainer


class LaunchedScorer:
    """One scoring process that can be replaced: `penstock.scoring.scorer_pool.ScoringWorker`."""

    def __init__(self, launcher: LocalLauncher, name: str, config: PenstockConfig) -> None:
        self._launcher = launcher
        self._name = name
        self._start = ScoringStart(
            reward=config.reward.model_dump(mode="json"),
            search_path=(str(Path.cwd()), *(entry for entry in sys.path if entry)),
        )
        self._worker: LocalWorker | None = None
        self._client: ScoringClient | None = None

    async def start(self) -> None:
        self._worker = await self._launcher.launch(self._name)
        self._client = ScoringClient(self._worker.channel)
        await _or_death(self._worker, self._client.start(self._start))

    async def score(self, group: Group) -> tuple[Score, ...]:
        assert self._client is not None and self._worker is not None
        try:
            return await self._client.score(group)
        except ChannelClosed:
            death = await self._worker.died()
            raise ScoringFailed(str(death), "score_worker_died", death.detail) from None

    async def restart(self) -> None:
        if self._worker is not None:
            await self._worker.kill()
            self._launcher.forget(self._worker)
            self._worker = None
        await self.start()


async def _or_death(worker: LocalWorker, starting: Awaitable[object]) -> None:
    """Wait for a worker's first answer; if its process ends instead, say so with its traceback."""
    try:
        await starting
    except ChannelClosed:
        raise await worker.died() from None
