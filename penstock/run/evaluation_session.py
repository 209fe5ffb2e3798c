"""Evaluates a model without training, with engines and scorers but no trainer and no run folder, and computes
the mean reward and pass@k."""

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config.root import PenstockConfig
from penstock.durability.work_replay import WorkReplay
from penstock.engines.engine_pool import EnginePool
from penstock.errors import PenstockError, UserError
from penstock.models.adapter_folder import read_adapter
from penstock.models.support import load_config
from penstock.models.tokenizer import check_prompts, warn_of_unknown_characters
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent, LogLine
from penstock.placement.automatic import resolve_auto
from penstock.placement.gpu_pools import engine_pools, engines_alone, visible_gpus
from penstock.placement.gpus import Gpu
from penstock.placement.placed_config import outline_on_gpu
from penstock.placement.refusals import check_capabilities, check_model
from penstock.placement.shares import place_threads, usable_cores
from penstock.processes.first_start import start_together
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.local import LocalLauncher
from penstock.processes.pooled_workers import PoolWatches
from penstock.processes.revival import Deaths, RestartPolicy, Reviver
from penstock.processes.supervision import supervised
from penstock.rollout.workflow import Workflows, load_workflow
from penstock.run.assembly import Parts, build_evaluator
from penstock.run.evaluation import Rewards
from penstock.run.preflight import Prepared, check_devices, open_model, resolve_prompts
from penstock.run.rollout_workers import start_episodes
from penstock.run.workers import (
    LaunchedEngine,
    engine_place,
    engine_start,
    first_start,
    start_scorers,
)
from penstock.scoring.functions import load_functions
from penstock.scoring.scoring_process import TrainerState
from penstock.tasks.sources import load_tasks
from penstock.tasks.stream import TaskStream


def prepare_evaluation(
    config: PenstockConfig, *, folder: Path, log: Callable[[str], None], cache: Path, gpus: tuple[Gpu, ...]
) -> Prepared:
    """Load and check what an evaluation needs. The engines' output goes into `folder`."""
    if config.eval.tasks is None:
        raise UserError(
            "there are no tasks to evaluate on; name them: --tasks FILE.jsonl, or eval.tasks in a config"
        )
    if config.model.adapter is not None:
        read_adapter(Path(config.model.adapter))
    check_capabilities(config, trains=False, gpus=gpus)
    check_devices(config, gpus)
    heldout = load_tasks(config.eval.tasks, log)
    load_functions(config.reward)
    named = config.rollout.workflow
    Workflows().check(heldout)
    model, tokenizer, max_context = open_model(config, log=log, cache=cache)
    check_model(config, load_config(model, trust_remote_code=config.model.trust_remote_code), trains=False)
    config = engines_alone(config, gpus)
    config, _, heldout = resolve_prompts(config, (), heldout, has_template=tokenizer.has_template, log=log)
    warn_of_unknown_characters([task.prompt for task in heldout], tokenizer, log)
    check_prompts(heldout, tokenizer, max_context=max_context, max_new_tokens=config.rollout.max_new_tokens)
    outline = outline_on_gpu(config, model, gpus)
    resolved = resolve_auto(
        config, gpus, num_parameters=outline.num_parameters if outline else 0, trains=False
    )
    if resolved.engine_choices:
        log(resolved.engine_choices)
    return Prepared(
        config=resolved.config,
        model=model,
        tokenizer=tokenizer,
        tasks=[],
        heldout=heldout,
        folder=folder,
        max_context=max_context,
        gpus=gpus,
        workflow=None if named is None else load_workflow(named, config.rollout.http),
        merged_adapter=config.model.adapter or "",
    )


async def evaluate(prepared: Prepared, log: Callable[[str], None] = lambda line: None) -> list[Rewards]:
    """Return the rewards of every held-out task's answers."""
    stream = EventStream(asyncio.get_running_loop())
    stream.subscribe("log", _Lines(log))
    events, policy = stream.of("controller"), RestartPolicy(max_deaths=prepared.config.run.restarts + 1)
    async with LocalLauncher(prepared.folder / "logs") as launcher:
        engines = _engines(launcher, prepared)
        deaths = {engine.name: Deaths(policy) for engine in engines}
        await start_together([first_start(each, deaths[each.name], log) for each in engines], events)
        pool = EnginePool({each.name: each.calls for each in engines}, replaces=True)
        reviver = Reviver(events=events, policy=policy, deaths=deaths)
        watches = [reviver.over(each.place, _RevivableEngine(each, pool, log)) for each in engines]
        return await supervised(_evaluate_on(launcher, prepared, pool, PoolWatches(events)), watches)


class _RevivableEngine:
    """Implements `penstock.processes.revival.Revivable` for an engine whose weights never change."""

    is_needed = is_replaceable = True

    def __init__(self, engine: LaunchedEngine, pool: EnginePool, log: Callable[[str], None]) -> None:
        self._engine, self._pool, self._log = engine, pool, log

    def lost(self) -> None:
        if self._engine.name in self._pool.names:
            self._pool.lose(self._engine.name)

    async def prepare(self) -> None:
        self._engine.lower_memory(self._log)

    async def returned(self) -> None:
        await self._pool.join(self._engine.name, self._engine.calls)


class _Lines:
    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, LogLine):
            self._log(event.line)

    def close(self) -> None:
        pass


def _engines(launcher: Launcher, prepared: Prepared) -> list[LaunchedEngine]:
    """Make the engines, without starting them."""
    section = prepared.config.engine
    threads = place_threads(
        cores=usable_cores(), num_engines=len(section.members), max_staleness=0, engine=section.threads
    ).engine
    starts = [engine_start(launcher, prepared, index, threads) for index in range(len(section.members))]
    start_s = prepared.config.run.start_s
    return [
        LaunchedEngine(engine_place(launcher, start, visible_gpus(pool, os.environ), start_s), start)
        for start, pool in zip(starts, engine_pools(prepared.config), strict=True)
    ]


async def _evaluate_on(
    launcher: Launcher, prepared: Prepared, engine: EnginePool, pool_watches: PoolWatches
) -> list[Rewards]:
    scorer = await start_scorers(launcher, prepared, pool_watches)
    steps = prepared.config.run.steps
    scorer.training = lambda: TrainerState(global_step=steps, max_steps=steps)  # as after training
    episodes = await start_episodes(launcher, prepared, WorkReplay(engine=engine), pool_watches)
    parts = Parts(
        engines=engine,
        trainers=(),
        scorer=scorer,
        tokenizer=prepared.tokenizer,
        tasks=TaskStream(prepared.heldout),
        episodes=episodes,
    )
    try:
        evaluator = build_evaluator(prepared.config, parts, prepared.heldout)
        assert evaluator is not None
        return await supervised(evaluator.rewards(), pool_watches.watches)
    finally:
        await episodes.close()
        await scorer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Holds the result of an evaluation.

    `error` is the standard error of the mean over tasks. `pass_at[k]` is the chance that at least one of k
    answers to a task is correct.
    """

    reward: float
    error: float
    pass_at: dict[int, float]
    num_tasks: int
    num_answers: int
    num_failed: int
    """Tasks that could not be generated or scored; they count nowhere else."""
    failure: str = ""
    """Why the first of them failed."""


def pass_at(k: int, *, num: int, num_correct: int) -> float:
    """Estimate pass@k without bias from `num` >= k answers: the share of all choices of k of them that hold a
    correct one."""
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def report_of(
    rewards: Sequence[Sequence[float] | PenstockError], *, samples: int, correct: float
) -> EvaluationReport:
    """Summarise the rewards of each task's answers, or the error of a task that failed.

    An answer is correct from a reward of `correct` on; an answer without a reward, since its episode failed,
    is wrong.
    """
    scored = [values for values in rewards if not isinstance(values, PenstockError)]
    means = [sum(values) / len(values) for values in scored]
    hits = [sum(value >= correct for value in values) for values in scored]
    return EvaluationReport(
        reward=_mean(means),
        error=_standard_error(means),
        pass_at={
            k: _mean([pass_at(k, num=samples, num_correct=hit) for hit in hits]) for k in _powers(samples)
        },
        num_tasks=len(scored),
        num_answers=sum(len(values) for values in scored),
        num_failed=len(rewards) - len(scored),
        failure=next((str(result) for result in rewards if isinstance(result, PenstockError)), ""),
    )


def _powers(samples: int) -> list[int]:
    """Return 1, 2, 4, … and the number of answers itself."""
    return sorted({*(1 << bit for bit in range(samples.bit_length())), samples})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
