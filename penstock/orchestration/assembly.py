"""One function that builds the controller from a config and its parts.

Sessions pass clients of real processes, the simulation and the tests pass stand-ins: all get the same gate,
buffer, selection, runner and planner, wired in the same way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from penstock.blobs import MemoryBlobs
from penstock.buffer.admission import StalenessGate
from penstock.buffer.blob_cleanup import CleaningLog
from penstock.buffer.group_log import GroupLog, NoGroupLog
from penstock.buffer.history import VersionHistory
from penstock.buffer.rollout_buffer import RolloutBuffer
from penstock.engines.engine_pool import EnginePool
from penstock.errors import EngineLost
from penstock.interfaces import BlobStore, Engine, Scorer, Tokenizer, Trainer
from penstock.observe.event_stream import EventStream
from penstock.orchestration.activity import Activity
from penstock.orchestration.checkpoints import Checkpoints
from penstock.orchestration.closed_loop import ClosedLoop, starting_bound
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.controller import Controller
from penstock.orchestration.controller_events import ControllerEvents
from penstock.orchestration.episode_advantages import episode_advantages
from penstock.orchestration.evaluation import Evaluator
from penstock.orchestration.failure_streak import FailureStreak, limit_of
from penstock.orchestration.group_production import GroupProduction, TaskSource
from penstock.orchestration.intake import Intake
from penstock.orchestration.resume import BroughtBack, Resume
from penstock.orchestration.step_planner import StepPlanner
from penstock.orchestration.step_runner import StepRunner
from penstock.orchestration.trainer_group import TrainerGroup, group_of
from penstock.orchestration.weight_sync import Retries, WeightSync
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes
from penstock.rollout.episode_spec import EVALUATION
from penstock.rollout.group_runner import RolloutRunner
from penstock.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a controller works with."""

    engine: Engine
    trainers: Sequence[Trainer] | TrainerGroup
    scorer: Scorer
    tokenizer: Tokenizer
    tasks: TaskSource
    episodes: EpisodeRunner | None = None
    """Runs workflows; None asks the engine for single turns."""
    log: GroupLog | None = None
    blobs: BlobStore | None = None
    """The store that engines and trainers share; None: they refer to nothing."""
    checkpoints: Checkpoints | None = None
    """Where a run's state goes between steps; None: nowhere."""
    undone: Callable[[int], Awaitable[BroughtBack]] | None = None
    """Gives the groups of steps that are undone; None: nobody keeps them."""


def build_controller(
    config: PenstockConfig,
    parts: Parts,
    *,
    resume: Resume | None = None,
    events: EventStream | None = None,
) -> Controller:
    """`events` is where everything that happens is told; without it nobody hears."""
    rollout, staleness, trainer = config.rollout, config.staleness, config.trainer
    gate = StalenessGate(
        groups_per_step=rollout.groups_per_step,
        max_staleness=starting_bound(staleness),
        late=staleness.late,
        ahead=staleness.ahead,
        num_groups=config.run.steps * rollout.groups_per_step,
        history=VersionHistory.of(resume.history) if resume is not None else None,
    )
    if resume is not None:
        gate.restore(resume.gate)
    blobs: BlobStore = parts.blobs if parts.blobs is not None else MemoryBlobs()
    log = CleaningLog(parts.log or NoGroupLog(), blobs)
    gate.history.on_issue = log.issued
    buffer = RolloutBuffer(gate, log=log)
    loop = ClosedLoop.of(staleness, buffer)
    told = ControllerEvents(
        events or EventStream(asyncio.get_running_loop()),
        gate,
        advantages=partial(episode_advantages, config.algorithm),
        decode=parts.tokenizer.decode,
    )
    if resume is not None:
        told.lost(resume.lost)
    activity, group = Activity(), group_of(parts.trainers)
    return Controller(
        production=GroupProduction(
            runner=build_runner(config, parts),
            scorer=parts.scorer,
            tasks=parts.tasks,
            buffer=buffer,
            intake=Intake(
                buffer,
                config.algorithm.selection,
                max_filtered_in_a_row=staleness.max_filtered_in_a_row,
            ),
            failures=FailureStreak(
                limit_of(config.run.max_failed_in_a_row, rollout.groups_per_step, staleness.loosest)
            ),
            blobs=blobs,
            activity=activity,
            events=told,
            resume=resume,
        ),
        buffer=buffer,
        runner=StepRunner(
            trainers=group,
            planner=StepPlanner(
                ranks=group.num_plans,
                micro_batch_tokens=trainer.micro_batch_tokens,
                shared_prompts=trainer.shared_prompts,
                traced=config.observe.traced_answers if config.observe.tokens_mb else 0,
            ),
            buffer=buffer,
            blobs=blobs,
            events=told,
        ),
        sync=build_sync(config, parts, buffer, told, activity),
        trainer=group.as_one,
        steps=config.run.steps,
        activity=activity,
        events=told,
        after_step=loop.observe,
        starting_updates=2 if config.model.trains_adapter else 1,
        publish_every=config.sync.every,
        checkpoints=parts.checkpoints,
        undone=parts.undone,
    )


def build_sync(
    config: PenstockConfig, parts: Parts, buffer: RolloutBuffer, events: ControllerEvents, activity: Activity
) -> WeightSync:
    engine, section = parts.engine, config.sync
    of_a_pool: dict[str, Any] = (
        {"expel_failed": engine.expel_failed, "mend": engine.mend} if isinstance(engine, EnginePool) else {}
    )
    sync = WeightSync(
        trainer=group_of(parts.trainers).as_one,
        engine=engine,
        buffer=buffer,
        events=events,
        activity=activity,
        interrupt=section.interrupt,
        retries=Retries(count=section.retries, first_s=section.retry_s),
        **of_a_pool,
    )
    if isinstance(engine, EnginePool):

        def lost(name: str, error: EngineLost) -> None:
            events.recorder.log(f"{name} is lost, its requests begin again elsewhere or wait for it: {error}")
            sync.renew()

        engine.on_lost = lost
    return sync


def build_runner(config: PenstockConfig, parts: Parts) -> RolloutRunner:
    rollout = config.rollout
    return RolloutRunner(
        _episodes(parts),
        sampling=rollout.sampling(parts.tokenizer.stop_token_ids, seed=config.run.seed),
        group_size=rollout.group_size,
        chunk_tokens=rollout.chunk_tokens,
        timeout_s=rollout.timeout_s,
        in_waves=config.run.deterministic,
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
    )


def build_evaluator(config: PenstockConfig, parts: Parts, heldout: Sequence[Task]) -> Evaluator | None:
    """None without held-out tasks."""
    if not heldout:
        return None
    section = config.eval
    sampling = config.rollout.sampling(parts.tokenizer.stop_token_ids, seed=config.run.seed + 1)
    if section.temperature is not None:
        sampling = msgspec.structs.replace(sampling, temperature=section.temperature)
    runner = RolloutRunner(
        _episodes(parts),
        sampling=sampling,
        group_size=section.samples,
        min_good=1,
        timeout_s=config.rollout.timeout_s,
        label=EVALUATION,
        in_waves=config.run.deterministic,
        max_turns=config.rollout.max_turns,
        max_episode_tokens=config.rollout.max_episode_tokens,
    )
    return Evaluator(runner, parts.scorer, heldout)


def _episodes(parts: Parts) -> EpisodeRunner:
    return parts.episodes or LocalEpisodes(parts.engine, parts.tokenizer)
