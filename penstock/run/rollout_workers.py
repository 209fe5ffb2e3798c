"""Starts what runs workflows: the controller itself, or worker processes that can be replaced."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from penstock.channel import Channel, remote, serve
from penstock.durability.work_replay import WorkReplay
from penstock.placement.shares import usable_cores
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.memory_limit import memory_environment
from penstock.processes.pooled_workers import PoolWatches, start_pooled
from penstock.processes.replaceable import ReplaceableWorker
from penstock.records import DEFAULT_POLICY, Episode
from penstock.rollout.episode_pool import EpisodePool
from penstock.rollout.episode_rollout import TokenSource
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.retrying_episodes import CallsSoFar, RetryingEpisodes
from penstock.rollout.rollout_process import (
    START_ROLLOUT,
    CallKeeper,
    Outcome,
    RolloutProcess,
    RolloutStart,
)
from penstock.run.preflight import Prepared
from penstock.usercode import is_command, search_path


async def start_episodes(
    launcher: Launcher, prepared: Prepared, work: WorkReplay, pool_watches: PoolWatches | None = None
) -> EpisodeRunner:
    """Start rollout workers if `rollout.workers` or a command needs them and they can load the workflow;
    otherwise episodes run in this process. Episodes that could not reach a service are retried."""
    calls = CallsSoFar(work.keep_call)
    work = replace(work, keep_call=calls.keep)
    episodes = await _start(launcher, prepared, work, pool_watches)

    def report(episode: Episode, count: int, wait_s: float) -> None:
        words = retry_words(episode, count, wait_s)
        if pool_watches is not None and words is not None:
            pool_watches.events.log(words)

    return RetryingEpisodes(episodes, calls, retries=prepared.config.rollout.retries, report=report)


async def _start(
    launcher: Launcher, prepared: Prepared, work: WorkReplay, pool_watches: PoolWatches | None
) -> EpisodeRunner:
    rollout = prepared.config.rollout
    num_workers = max(rollout.workers, 1 if _names_a_command(prepared) else 0)
    if num_workers == 0 or not _is_loadable(prepared):
        if pool_watches is not None and _is_loadable(prepared):
            pool_watches.events.log(
                "workflows run in the controller (rollout.workers=0), where no limit of CPU time or memory holds"
            )
        return LocalEpisodes(work.engine, prepared.tokenizer, prepared.workflow, work.keep_call, rollout.http)
    places = [rollout_place(launcher, f"rollout{index}", prepared, work) for index in range(num_workers)]
    restarts = prepared.config.run.restarts
    workers = await start_pooled(places, _running_in, restarts, pool_watches)
    report = (lambda words: None) if pool_watches is None else pool_watches.events.log
    pool = EpisodePool(
        workers,
        capacity=rollout.episodes_per_worker,
        workflow=rollout.workflow,
        commands=rollout.processes or usable_cores(),
        max_deaths=restarts + 1,
        report=report,
    )
    if pool_watches is not None:
        pool_watches.add(workers, pool)
    return pool


def retry_words(episode: Episode, count: int, wait_s: float) -> str | None:
    """Return a log line for the first episode that is retried, the tenth, the hundredth, and so on."""
    if count != 10 ** (len(str(count)) - 1):
        return None
    return (
        f"an episode of task {episode.task_id!r} could not reach something ({episode.message}); it is run again in "
        f"{wait_s:g} s (rollout.retries); {count} so far"
    )


def _is_loadable(prepared: Prepared) -> bool:
    """Return whether the run or a task names a workflow, and none exists only in this process."""
    if prepared.workflow is not None:
        return prepared.config.rollout.workflow is not None
    return any(task.workflow is not None for task in (*prepared.tasks, *prepared.heldout))


def _names_a_command(prepared: Prepared) -> bool:
    """Return whether a workflow is a command, which needs a process that answers it."""
    named = {prepared.config.rollout.workflow}
    named |= {task.workflow for task in (*prepared.tasks, *prepared.heldout)}
    return any(path is not None and is_command(path) for path in named)


def _running_in(place: ReplaceableWorker) -> Callable[[Sequence[EpisodeSpec]], Awaitable[Sequence[Outcome]]]:
    process = remote(RolloutProcess, place)

    async def run(specs: Sequence[EpisodeSpec]) -> Sequence[Outcome]:
        return [await process.run(spec) for spec in specs]

    return run


def rollout_place(launcher: Launcher, name: str, prepared: Prepared, work: WorkReplay) -> ReplaceableWorker:
    """Make a rollout worker. Its episodes request turns over the channel by which it is called: both sides
    serve."""
    start = RolloutStart(
        model=prepared.model,
        trust_remote_code=prepared.config.model.trust_remote_code,
        template_args=prepared.config.tasks.template_args,
        workflow=prepared.config.rollout.workflow,
        max_context=prepared.max_context,
        cpu_s=prepared.config.rollout.cpu_s or prepared.config.rollout.timeout_s,
        host=prepared.config.rollout.agents.host,
        streams=prepared.config.sync.interrupt != "abort_retry",
        http=prepared.config.rollout.http.model_dump(mode="json"),
        model_names={
            prepared.config.model.name: DEFAULT_POLICY,
            **prepared.config.rollout.agents.models,
        },
        search_path=search_path(),
    )

    async def begin(channel: Channel) -> None:
        serve(TokenSource, work.engine, channel)
        serve(CallKeeper, work, channel)
        await channel.call(START_ROLLOUT, start)

    return ReplaceableWorker(
        launcher,
        name,
        start=begin,
        environment=memory_environment(prepared.config.rollout.memory_gb),
    )
