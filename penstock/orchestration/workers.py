"""Starts the worker processes of a run and hands out what the controller needs of them.

Each place can be filled anew (`ReplaceableWorker`): the engine, trainer or scorer in it stays the same object.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.blobs import open_blobs
from penstock.cores import usable_cores
from penstock.engines.engine_client import EngineClient, EngineStart
from penstock.errors import ChannelClosed, ScoringFailed
from penstock.interfaces import BlobStore
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.placement import Environments, place_threads, scorer_environment, sync_environment
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.scoring.scorer_pool import ScorerPool
from penstock.scoring.scoring_client import ScoringClient, ScoringRequest, ScoringStart, Verdict
from penstock.trainer.trainer_client import TrainerClient, TrainerStart
from penstock.types import (
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    StepPlan,
    StepResult,
    UpdateReceipt,
    WeightUpdate,
)


class LaunchedEngine:
    """`penstock.interfaces.Engine` in a process that can be replaced."""

    def __init__(self, place: ReplaceableWorker[EngineClient]) -> None:
        self.place = place

    @property
    def name(self) -> str:
        return self.place.name

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self.place.client.generate(request)

    async def stage(self, update: WeightUpdate) -> None:
        await self.place.client.stage(update)

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        return await self.place.client.update(update, interrupt)

    async def report(self) -> EngineReport:
        return await self.place.client.report()

    async def close(self) -> None:
        await self.place.client.close()


class LaunchedTrainer:
    """`penstock.interfaces.Trainer` in a process that can be replaced."""

    def __init__(self, place: ReplaceableWorker[TrainerClient]) -> None:
        self.place = place

    async def step(self, plan: StepPlan) -> StepResult:
        return await self.place.client.step(plan)

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        return await self.place.client.publish(version, full=full)

    async def snapshot(self, version: int) -> None:
        await self.place.client.snapshot(version)

    async def send(self, version: int) -> None:
        await self.place.client.send(version)

    async def release(self, version: int, *, delivered: bool = True) -> None:
        await self.place.client.release(version, delivered=delivered)

    async def save(self, folder: str) -> None:
        await self.place.client.save(folder)

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None:
        await self.place.client.checkpoint(folder, files, remove)


class LaunchedScorer:
    """`penstock.scoring.scorer_pool.ScoringWorker` in a process that can be replaced."""

    def __init__(self, place: ReplaceableWorker[ScoringClient]) -> None:
        self.place = place

    @property
    def needs_group(self) -> bool:
        return self.place.client.ready.needs_group

    @property
    def concurrency(self) -> int:
        return self.place.client.ready.concurrency

    async def score(self, requests: Sequence[ScoringRequest]) -> Sequence[Verdict]:
        try:
            return await self.place.client.score(requests)
        except ChannelClosed:
            death = await self.place.died()
            raise ScoringFailed(str(death), "score_worker_died", death.detail) from None

    async def restart(self) -> None:
        await self.place.restart()


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that a run can't do without."""

    engines: tuple[LaunchedEngine, ...]
    trainer: LaunchedTrainer
    blobs: BlobStore
    """The store that they share."""

    @property
    def places(self) -> tuple[ReplaceableWorker[EngineClient] | ReplaceableWorker[TrainerClient], ...]:
        return (self.trainer.place, *(engine.place for engine in self.engines))


async def start_workers(
    launcher: Launcher, prepared: Prepared, environments: Environments | None = None
) -> Workers:
    """All at once: the slowest to load decides how long it takes."""
    config = prepared.config
    environments = environments or Environments()
    threads = place_threads(
        cores=usable_cores(),
        num_engines=config.engine.count,
        max_staleness=config.staleness.max_staleness,
        engine=config.engine.threads,
        trainer=config.trainer.threads,
    )
    token, more = secrets.token_urlsafe(24), sync_environment(config.sync)
    trainer = trainer_place(launcher, prepared, threads.trainer, {**environments.trainer, **more}, token)
    engines = [
        engine_place(
            launcher, prepared, f"engine{index}", threads.engine, {**environments.engine, **more}, token
        )
        for index in range(config.engine.count)
    ]
    async with asyncio.TaskGroup() as starting:
        starting.create_task(trainer.start())
        for engine in engines:
            starting.create_task(engine.start())
    return Workers(
        tuple(LaunchedEngine(engine) for engine in engines),
        LaunchedTrainer(trainer),
        open_blobs(str(launcher.blobs)),
    )


async def start_scorers(launcher: Launcher, prepared: Prepared) -> ScorerPool:
    reward = prepared.config.reward
    environment = scorer_environment(reward.device, prepared.gpus, os.environ)
    places = [
        scorer_place(launcher, f"scorer{i}", prepared.config, environment) for i in range(reward.workers)
    ]
    await asyncio.gather(*(place.start() for place in places))
    return ScorerPool([LaunchedScorer(place) for place in places], timeout_s=reward.timeout_s)


def engine_place(
    launcher: Launcher,
    prepared: Prepared,
    name: str,
    threads: int,
    environment: Mapping[str, str],
    sync_token: str = "",
) -> ReplaceableWorker[EngineClient]:
    section = prepared.config.engine
    if prepared.memory is not None:
        share = {"memory_share": prepared.memory.memory_share}
        section = section.model_copy(update={"embedded": section.embedded.model_copy(update=share)})
    start = EngineStart(
        name=name,
        model=prepared.model,
        device=prepared.config.model.device,
        trust_remote_code=prepared.config.model.trust_remote_code,
        adapter=prepared.merged_adapter,
        lora=None
        if prepared.config.model.lora is None
        else prepared.config.model.lora.model_dump(mode="json"),
        threads=threads,
        config=section.model_dump(mode="json"),
        interface=prepared.config.sync.interface,
        sync_token=sync_token,
        blobs=str(launcher.blobs),
    )
    return ReplaceableWorker(
        launcher,
        name,
        connect=EngineClient,
        start=lambda client: client.start(start),
        threads=threads,
        environment=environment,
    )


def trainer_place(
    launcher: Launcher,
    prepared: Prepared,
    threads: int,
    environment: Mapping[str, str],
    sync_token: str = "",
) -> ReplaceableWorker[TrainerClient]:
    """Starts with the model, or with a checkpoint; versions go on from those that it knows."""
    config, saved = prepared.config, prepared.saved
    start = TrainerStart(
        model=prepared.model,
        pad_token=config.model.pad_token,
        trust_remote_code=config.model.trust_remote_code,
        lora=None if config.model.lora is None else config.model.lora.model_dump(mode="json"),
        adapter=config.model.adapter or "",
        device=config.model.device,
        threads=threads,
        total_steps=config.run.steps,
        seed=config.run.seed,
        folder=str(launcher.folder),
        blobs=str(launcher.blobs),
        max_context=prepared.max_context,
        sync=config.sync.model_dump(mode="json"),
        sync_token=sync_token,
        wire_dtype=config.sync.wire_dtype(config.engine.dtype),
        version=0 if saved is None else len(saved.progress.history.steps),
        checkpoint="" if saved is None else str(saved.checkpoint),
        trainer=config.trainer.model_dump(mode="json"),
        algorithm=config.algorithm.model_dump(mode="json"),
    )
    return ReplaceableWorker(
        launcher,
        "trainer",
        connect=TrainerClient,
        start=lambda client: client.start(start),
        threads=threads,
        environment=environment,
    )


def scorer_place(
    launcher: Launcher, name: str, config: PenstockConfig, environment: Mapping[str, str]
) -> ReplaceableWorker[ScoringClient]:
    start = ScoringStart(
        reward=config.reward.model_dump(mode="json"),
        search_path=(str(Path.cwd()), *(entry for entry in sys.path if entry)),
    )
    return ReplaceableWorker(
        launcher,
        name,
        connect=ScoringClient,
        start=lambda client: client.start(start),
        threads=config.reward.threads,
        environment=environment,
    )
