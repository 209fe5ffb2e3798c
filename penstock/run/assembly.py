"""Builds the controller from a config and its parts.

A `Run` passes clients of real processes, the simulation and the tests pass stand-ins. All get the same gate,
buffer, selection, runner and planner, wired in the same way.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.blob_stores import MemoryBlobs
from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import Checkpoints
from penstock.durability.durable_log import DurableGroupLog
from penstock.engines.engine_pool import EnginePool
from penstock.loop.activity import Activity
from penstock.loop.adaptive import ClosedLoop, starting_bound
from penstock.loop.admission import StalenessGate
from penstock.loop.controller import Controller
from penstock.loop.failure_streak import FailureStreak, limit_of
from penstock.loop.group_log import CleaningLog, GroupLog, MemoryGroupLog
from penstock.loop.group_production import GroupProduction, TaskSource
from penstock.loop.history import VersionHistory
from penstock.loop.resume import Resume, TrainedGroups
from penstock.loop.rollout_buffer import RolloutBuffer
from penstock.loop.step_planner import StepPlanner
from penstock.loop.step_runner import StepRunner
from penstock.loop.weight_sync import Retries, WeightSync
from penstock.observe.event_stream import EventStream
from penstock.processes.trainer_group import TrainerGroup, group_of
from penstock.records import Task
from penstock.records.interfaces import BlobStore, Scorer, Tokenizer, Trainer
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes
from penstock.rollout.episode_spec import EVALUATION
from penstock.rollout.group_runner import RolloutRunner
from penstock.run.controller_events import ControllerEvents
from penstock.run.evaluation import Evaluator
from penstock.run.step_answers import episode_advantages
from penstock.trainer.step.packing import plan_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Holds what a controller works with."""

    engines: EnginePool
    trainers: Sequence[Trainer] | TrainerGroup
    scorer: Scorer
    tokenizer: Tokenizer
    tasks: TaskSource
    episodes: EpisodeRunner | None = None
    """Runs workflows; None asks the engines for single turns."""
    log: GroupLog | None = None
    blobs: BlobStore | None = None
    """The blob store that engines and trainers share; None: records refer to no blobs."""
    checkpoints: Checkpoints | None = None
    """Writes the run's checkpoints; None: there are none."""
    trained_groups: TrainedGroups | None = None
    """Returns the groups of steps that are undone; None: they are not kept."""


def build_controller(
    config: PenstockConfig,
    parts: Parts,
    *,
    resume: Resume | None = None,
    events: EventStream | None = None,
) -> Controller:
    """Build a controller. Everything that happens is reported to `events`."""
    rollout, staleness, trainer, sync = config.rollout, config.staleness, config.trainer, config.sync
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
    log = CleaningLog(parts.log or MemoryGroupLog(), blobs)
    controller_events = ControllerEvents(
        events or EventStream(asyncio.get_running_loop()),
        gate,
        log.attempts,
        advantages=partial(episode_advantages, config.algorithm),
        decode=partial(parts.tokenizer.decode, skip_special_tokens=False),
        has_journal=isinstance(parts.log, DurableGroupLog),
    )
    buffer = RolloutBuffer(gate, log=log, dropped=controller_events.dropped, give_back=parts.tasks.put_back)
    activity, group = Activity(log.attempts), group_of(parts.trainers)
    weight_sync = WeightSync(
        trainer=group.as_one,
        engines=parts.engines,
        buffer=buffer,
        events=controller_events,
        activity=activity,
        interrupt=sync.interrupt,
        retries=Retries(count=sync.retries, first_s=sync.retry_s),
    )
    parts.engines.on_lost = weight_sync.engine_lost
    return Controller(
        production=GroupProduction(
            runner=build_runner(config, parts),
            scorer=parts.scorer,
            tasks=parts.tasks,
            buffer=buffer,
            selection=config.algorithm.selection,
            max_filtered_in_a_row=staleness.max_filtered_in_a_row,
            failures=FailureStreak(
                limit_of(config.run.max_failed_in_a_row, rollout.groups_per_step, staleness.loosest)
            ),
            blobs=blobs,
            events=controller_events,
            resume=resume,
        ),
        buffer=buffer,
        runner=StepRunner(
            trainers=group,
            planner=StepPlanner(
                plan_step=plan_step,
                ranks=group.num_plans,
                micro_batch_tokens=trainer.micro_batch_tokens,
                shared_prompts=trainer.shared_prompts,
                traced=config.observe.traced_answers if config.observe.tokens_mb else 0,
            ),
            buffer=buffer,
            blobs=blobs,
            events=controller_events,
        ),
        sync=weight_sync,
        trainer=group.as_one,
        steps=config.run.steps,
        activity=activity,
        events=controller_events,
        closed_loop=ClosedLoop.of(staleness, buffer),
        starting_updates=2 if config.model.trains_adapter else 1,
        publish_every=sync.every,
        checkpoints=parts.checkpoints,
        trained_groups=parts.trained_groups,
    )


def build_runner(config: PenstockConfig, parts: Parts) -> RolloutRunner:
    rollout = config.rollout
    return RolloutRunner(
        _episodes(parts),
        sampling=rollout.sampling(parts.tokenizer.stop_token_ids, seed=config.run.seed),
        group_size=rollout.group_size,
        chunk_tokens=rollout.chunk_tokens,
        timeout_s=rollout.timeout_s,
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
    )


def build_evaluator(config: PenstockConfig, parts: Parts, heldout: Sequence[Task]) -> Evaluator | None:
    """Build the evaluator of the held-out tasks; None without any."""
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
        max_turns=config.rollout.max_turns,
        max_episode_tokens=config.rollout.max_episode_tokens,
    )
    return Evaluator(runner, parts.scorer, heldout)


def _episodes(parts: Parts) -> EpisodeRunner:
    return parts.episodes or LocalEpisodes(parts.engines, parts.tokenizer)
