"""Starts the worker processes of a run, and returns what the controller needs of them.

Each `ReplaceableWorker` can get another process; the engine, trainer or scorer over it stays the same object.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.blob_stores import open_blobs
from penstock.channel import Channel, remote
from penstock.channel.address import host_and_port, is_loopback
from penstock.config.root import PenstockConfig
from penstock.engines.config import with_settings
from penstock.engines.engine_start import START_ENGINE, EngineStart
from penstock.engines.kinds import settings_of
from penstock.errors import TrainerLost
from penstock.observe.pulse import LONG_S
from penstock.observe.recorder import Recorder
from penstock.placement.gpu_pools import engine_pools, visible_gpus
from penstock.placement.shares import (
    Environments,
    place_threads,
    rank_environment,
    scorer_environment,
    usable_cores,
)
from penstock.processes.first_start import FirstStart, start_together
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.memory_limit import memory_environment
from penstock.processes.pooled_workers import PoolWatches, start_pooled
from penstock.processes.replaceable import ReplaceableWorker
from penstock.processes.revival import Deaths, RestartPolicy, fewer_sequences
from penstock.processes.trainer_group import TrainerGroup
from penstock.processes.trainer_ranks import TrainerRanks
from penstock.records import (
    EngineReport,
)
from penstock.records.interfaces import BlobStore, Engine
from penstock.run.preflight import Prepared
from penstock.scoring.scorer_pool import ScorerPool
from penstock.scoring.scoring_process import (
    START_SCORING,
    ScoringProcess,
    ScoringReady,
    ScoringRequest,
    ScoringStart,
    Verdict,
)
from penstock.sync.config import SyncConfig
from penstock.sync.interface import address_for_others
from penstock.sync.transports import transport_of
from penstock.trainer.plan_transfer import remote_trainer
from penstock.trainer.trainer_start import START_TRAINER, TrainerStart
from penstock.usercode import search_path


class LaunchedEngine:
    """Owns an engine whose process can be replaced. `calls` is its `Engine` interface."""

    def __init__(self, place: ReplaceableWorker, start: EngineStart | None = None) -> None:
        """`start` is the start message of its process, from which that of the next is made."""
        self.place = place
        self.calls = remote(Engine, place)
        self.start = start
        if start is not None:
            place.set_start(self._begin)

    @property
    def name(self) -> str:
        return self.place.name

    def lower_memory(self, say: Callable[[str], None]) -> None:
        """Let the next process compute fewer sequences at a time, if this one ran out of memory."""
        death = self.place.last_death
        if self.start is None or death is None or not death.out_of_memory:
            return
        if (lowered := fewer_sequences(self.start)) is not None:
            self.start, word = lowered
            say(word)

    async def _begin(self, channel: Channel) -> EngineReport:
        assert self.start is not None
        return await channel.call(START_ENGINE, self.start)


class LaunchedTrainer:
    """Owns a trainer whose processes, one or several, can be replaced. `calls` is its `Trainer` interface; calls
    to a process that is gone raise `TrainerLost`."""

    def __init__(self, place: TrainerRanks, start: TrainerStart, *, share_plans: int = 1) -> None:
        """`start` is the start message of its first processes."""
        ranks = [remote_trainer(member, TrainerLost) for member in place.members]
        self.place = place
        self.start = start
        self.group = TrainerGroup(ranks, share_plans=share_plans, give_up=place.give_up)
        self.calls = self.group.as_one


class EngineMaker(Protocol):
    def __call__(self, index: int, launcher: Launcher) -> LaunchedEngine: ...


@dataclass(frozen=True, slots=True)
class Workers:
    engines: tuple[LaunchedEngine, ...]
    trainer: LaunchedTrainer
    blobs: BlobStore
    """The blob store that they share."""
    another_engine: "EngineMaker"
    """Makes an engine with a given number, without starting it."""
    deaths: Mapping[str, Deaths]
    """The deaths of every worker by name, including those while it started."""
    starts: Sequence[FirstStart]
    """The starts of all workers, for those that die before they are watched."""

    @property
    def places(self) -> tuple[ReplaceableWorker | TrainerRanks, ...]:
        return (self.trainer.place, *(engine.place for engine in self.engines))


async def start_workers(
    launcher: Launcher,
    prepared: Prepared,
    environments: Environments | None = None,
    events: Recorder | None = None,
) -> Workers:
    """Start the trainer and all engines at once: the slowest to load decides how long it takes."""
    config, log = prepared.config, (lambda line: None) if events is None else events.log
    environments = environments or Environments()
    threads = place_threads(
        cores=usable_cores(),
        num_engines=max(len(config.engine.members), config.engine.num_most),
        max_staleness=config.staleness.max_staleness,
        engine=config.engine.threads,
        trainer=config.trainer.threads,
        num_ranks=config.trainer.parallel.num_ranks,
    )
    token, more = secrets.token_urlsafe(24), dict(transport_of(config.sync.transport).environment)
    own = visible_gpus(config.placement.trainer, os.environ)
    trainer = trainer_of(launcher, prepared, threads.trainer, {**environments.trainer, **more, **own}, token)
    pools = engine_pools(config)

    def engine(index: int, launcher: Launcher) -> LaunchedEngine:
        gpus = visible_gpus(pools[index], os.environ) if index < len(pools) else {}
        start = engine_start(launcher, prepared, index, threads.engine, token)
        environment = {**environments.engine, **more, **gpus}
        return LaunchedEngine(engine_place(launcher, start, environment, config.run.start_s), start)

    engines = [engine(index, launcher) for index in range(len(config.engine.members))]
    policy = RestartPolicy(max_deaths=config.run.restarts + 1)
    deaths = {name: Deaths(policy) for name in (trainer.place.name, *(each.name for each in engines))}
    starts = [FirstStart(trainer.place, deaths[trainer.place.name])]
    starts += [first_start(each, deaths[each.name], log) for each in engines]
    await start_together(starts, events)
    return Workers(tuple(engines), trainer, open_blobs(str(launcher.blobs)), engine, deaths, starts)


def first_start(engine: LaunchedEngine, deaths: Deaths, log: Callable[[str], None]) -> FirstStart:
    """Return the `FirstStart` of an engine, which needs less memory after it ran out of it."""
    return FirstStart(engine.place, deaths, prepare=lambda: engine.lower_memory(log))


async def start_scorers(
    launcher: Launcher, prepared: Prepared, pool_watches: PoolWatches | None = None
) -> ScorerPool:
    reward = prepared.config.reward
    environment = {
        **scorer_environment(reward.device, prepared.gpus, os.environ),
        **memory_environment(reward.memory_gb, is_on_gpu=reward.device != "cpu"),
    }
    places = [
        scorer_place(launcher, f"scorer{i}", prepared.config, environment) for i in range(reward.workers)
    ]
    restarts = prepared.config.run.restarts
    workers = await start_pooled(places, _scoring_in, restarts, pool_watches)
    ready: list[ScoringReady] = [place.answer for place in places]
    pool = ScorerPool(
        [(worker, one.concurrency) for worker, one in zip(workers, ready, strict=True)],
        needs_group=any(one.needs_group for one in ready),
        timeout_s=reward.timeout_s,
        max_deaths=restarts + 1,
        report=(lambda words: None) if pool_watches is None else pool_watches.events.log,
    )
    if pool_watches is not None:
        pool_watches.add(workers, pool)
    return pool


def _scoring_in(
    place: ReplaceableWorker,
) -> Callable[[Sequence[ScoringRequest]], Awaitable[Sequence[Verdict]]]:
    process = remote(ScoringProcess, place)
    return lambda requests: process.score(tuple(requests))


def engine_start(
    launcher: Launcher, prepared: Prepared, index: int, threads: int, sync_token: str = ""
) -> EngineStart:
    """Return the start message of an engine by its number (`config.engine.member`)."""
    name, section = f"engine{index}", prepared.config.engine.member(index)
    if prepared.memory is not None and hasattr(settings_of(section), "memory_share"):
        section = with_settings(section, memory_share=prepared.memory.memory_share)
    return EngineStart(
        name=name,
        model=prepared.model,
        device=prepared.config.model.device,
        trust_remote_code=prepared.config.model.trust_remote_code,
        adapter=prepared.merged_adapter,
        search_path=search_path(),
        lora=None
        if prepared.config.model.lora is None
        else prepared.config.model.lora.model_dump(mode="json"),
        threads=threads,
        config=section.model_dump(mode="json"),
        interface=prepared.config.sync.interface,
        sync_token=sync_token,
        folder=str(launcher.folder),
        blobs=str(launcher.blobs),
    )


def engine_place(
    launcher: Launcher, start: EngineStart, environment: Mapping[str, str], start_s: float = LONG_S
) -> ReplaceableWorker:
    return ReplaceableWorker(
        launcher,
        start.name,
        start=lambda channel: channel.call(START_ENGINE, start),
        threads=start.threads,
        environment=environment,
        start_s=start_s,
    )


def trainer_of(
    launcher: Launcher,
    prepared: Prepared,
    threads: int,
    environment: Mapping[str, str],
    sync_token: str = "",
) -> LaunchedTrainer:
    """Make the trainer, without starting it. It begins with the model or a checkpoint, and continues the
    versions that were issued."""
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
        sync=sync_section(config.sync, config.launcher, prepared.folder).model_dump(mode="json"),
        sync_token=sync_token,
        wire_dtype=config.sync.wire_dtype(config.engine.dtype),
        replays_routing=config.engine.record_routing == "on",
        deterministic=config.run.deterministic,
        version=0 if saved is None else len(saved.progress.history.steps),
        checkpoint="" if saved is None or saved.checkpoint is None else str(saved.checkpoint),
        trainer=config.trainer.model_dump(mode="json"),
        algorithm=config.algorithm.model_dump(mode="json"),
        search_path=search_path(),
    )
    parallel = config.trainer.parallel
    environment = {**environment, **rank_environment(parallel.num_ranks, config.sync)}
    places = [
        ReplaceableWorker(
            launcher,
            f"trainer{rank or ''}",
            start=lambda channel: channel.call(START_TRAINER, start),
            threads=threads,
            environment=environment,
            start_s=config.run.start_s,
        )
        for rank in range(parallel.num_ranks)
    ]
    meet = f"file://{launcher.blobs.parent}/ranks"  # a folder that all of them see
    group = TrainerRanks(places, start, meet=meet)
    return LaunchedTrainer(group, start, share_plans=parallel.tensor * parallel.context)


def scorer_place(
    launcher: Launcher, name: str, config: PenstockConfig, environment: Mapping[str, str]
) -> ReplaceableWorker:
    start = ScoringStart(
        reward=config.reward.model_dump(mode="json"),
        search_path=search_path(),
    )
    return ReplaceableWorker(
        launcher,
        name,
        start=lambda channel: channel.call(START_SCORING, start),
        threads=config.reward.threads,
        environment=environment,
    )


def sync_section(sync: SyncConfig, launcher: LauncherConfig, folder: Path) -> SyncConfig:
    """Return the sync settings for a trainer whose engines may be on other machines.

    Files go to a folder of the run. A trainer on this machine serves on the address where these engines
    connect; one elsewhere finds its address itself.
    """
    transport = transport_of(sync.transport)
    takes_folder = transport.between_machines and "folder" in transport.publisher_takes
    if launcher.reaches_other_machines and takes_folder and not sync.folder:
        return sync.model_copy(update={"folder": str(folder / "weights")})
    is_named_by_both = "interface" in transport.receiver_takes
    if not (launcher.is_local and launcher.listen) or sync.interface or is_named_by_both:
        return sync
    host, _ = host_and_port(launcher.listen, "launcher.listen")
    return sync if is_loopback(host) else sync.model_copy(update={"interface": address_for_others(host)})
