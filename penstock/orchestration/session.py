"""One run from its config to its summary: wiring, and nothing but wiring.

prepare ─► workers start ─► version 0 verified ─► evaluate ─► train ─► evaluate ─► save ─► summary
"""

import asyncio
import gc
import os
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from penstock.engines.engine_pool import EnginePool
from penstock.errors import ChannelClosed, PenstockError, UserError, WorkerDied
from penstock.interfaces import Engine, Scorer
from penstock.observe.views import View
from penstock.orchestration.assembly import Parts, build_controller, build_evaluator
from penstock.orchestration.controller import Controller
from penstock.orchestration.evaluation import Evaluator
from penstock.orchestration.launchers.local import LocalLauncher
from penstock.orchestration.monitor import RunMonitor
from penstock.orchestration.placement import sharing
from penstock.orchestration.preflight import Prepared, open_writers
from penstock.orchestration.summary import Summary
from penstock.orchestration.workers import LaunchedScorer, Workers, start_workers
from penstock.rollout.group_runner import Workflow
from penstock.scoring.scorer_pool import ScorerPool
from penstock.tasks.stream import TaskStream

T = TypeVar("T")


@dataclass(slots=True)
class Timings:
    started: float = 0.0
    training_started: float = 0.0
    training_ended: float = 0.0
    engine_busy_s: float = 0.0
    tokens: float = 0.0


class Session:
    """Owns the processes of one run. `stop` asks it to end early, with the model saved."""

    def __init__(
        self,
        prepared: Prepared,
        view: View,
        *,
        scorer: Scorer | None = None,
        workflow: Workflow | None = None,
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._view = view
        self._scorer = scorer
        self._workflow = workflow
        self._controller: Controller | None = None
        self._stopped = False
        self._timings = Timings()

    def stop(self) -> None:
        """End after the step in progress. Safe to call at any time."""
        self._stopped = True
        if self._controller is not None:
            self._controller.stop()

    async def run(self) -> Summary:
        self._timings.started = time.monotonic()
        writers = open_writers(self._prepared)
        monitor = RunMonitor(
            name=self._prepared.folder.name,
            steps=self._config.run.steps,
            config=self._config.observe,
            view=self._view,
            writers=writers,
        )
        try:
            with sharing(self._config, self._prepared.gpus, os.environ, self._view.log) as environments:
                async with LocalLauncher(self._prepared.folder / "logs") as launcher:
                    workers = await _unwrapped(start_workers(launcher, self._prepared, environments))
                    scorer = self._scorer or await self._start_scorers(launcher)
                    return await self._supervise(workers, scorer, monitor)
        finally:
            for writer in writers:
                writer.close()
            self._view.close()

    async def _start_scorers(self, launcher: LocalLauncher) -> ScorerPool:
        reward = self._config.reward
        scorers = [LaunchedScorer(launcher, f"scorer{i}", self._config) for i in range(reward.workers)]
        await asyncio.gather(*(scorer.start() for scorer in scorers))
        return ScorerPool(scorers, timeout_s=reward.timeout_s)

    async def _supervise(self, workers: Workers, scorer: Scorer, monitor: RunMonitor) -> Summary:
        """Run the work beside a watch on the processes that it can't do without."""
        work = asyncio.create_task(self._work(workers, scorer, monitor))
        death = asyncio.create_task(workers.first_death())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not _lost_a_worker(work):
                return await _unwrapped(work)
            raise await asyncio.wait_for(death, 10)
        finally:
            work.cancel()
            death.cancel()
            await asyncio.gather(work, death, return_exceptions=True)
            await scorer.close()

    async def _work(self, workers: Workers, scorer: Scorer, monitor: RunMonitor) -> Summary:
        engine: Engine = EnginePool(workers.engines)
        config, prepared = self._config, self._prepared
        parts = Parts(
            engine=engine,
            trainers=[workers.trainer],
            scorer=scorer,
            tokenizer=prepared.tokenizer,
            tasks=TaskStream(prepared.tasks, seed=config.run.seed, shuffle=config.tasks.shuffle),
            workflow=self._workflow,
            blobs=workers.blobs,
        )
        controller = self._controller = build_controller(
            config, parts, on_step=monitor.on_step, on_update=monitor.on_update, on_drop=monitor.on_drop
        )
        evaluator = build_evaluator(config, parts, prepared.heldout)
        async with asyncio.TaskGroup() as background:
            watching = background.create_task(monitor.watch(controller, workers.engines))
            monitor.phase = "verifying weights"
            await controller.start()
            await self._evaluate(evaluator, monitor, 0)
            if not self._stopped:
                await self._train(controller, evaluator, monitor, engine)
            await self._evaluate(evaluator, monitor, controller.tally.steps)
            monitor.phase = "saving"
            await workers.trainer.save(str(self._prepared.folder / "model"))
            watching.cancel()
        summary = self._summarise(controller, monitor)
        summary.write(self._prepared.folder)
        return summary

    async def _train(
        self, controller: Controller, evaluator: Evaluator | None, monitor: RunMonitor, engine: Engine
    ) -> None:
        monitor.phase = "training"
        gc.collect()
        gc.freeze()  # tasks and libraries stay: no need for the collector to walk them between messages
        before = (await engine.report()).counters
        self._timings.training_started = time.monotonic()
        async with asyncio.TaskGroup() as beside:
            evaluating = beside.create_task(self._evaluate_regularly(controller, evaluator, monitor))
            await controller.run()
            evaluating.cancel()
        self._timings.training_ended = time.monotonic()
        after = (await engine.report()).counters
        self._timings.engine_busy_s = after["busy_s"] - before["busy_s"]
        self._timings.tokens = after["tokens"] - before["tokens"]

    async def _evaluate_regularly(
        self, controller: Controller, evaluator: Evaluator | None, monitor: RunMonitor
    ) -> None:
        """Evaluations beside training, on whatever weights the engines serve meanwhile."""
        every = self._config.eval.every
        if evaluator is None or every == 0:
            return
        step = every
        while step < self._config.run.steps:
            await controller.reached(step)
            result = await evaluator.run()
            monitor.on_evaluation(step, result.reward)
            monitor.log(f"step {step}: held-out reward {result.reward:.3f}")
            step = (controller.tally.steps // every + 1) * every

    async def _evaluate(self, evaluator: Evaluator | None, monitor: RunMonitor, step: int) -> None:
        if evaluator is None or (self._stopped and step == 0):
            return
        monitor.phase = "evaluating"
        result = await evaluator.run()
        monitor.on_evaluation(step, result.reward)
        failed = f", {result.num_failed} tasks could not be scored" if result.num_failed else ""
        monitor.log(
            f"held-out reward {result.reward:.3f} at step {step} ({result.num_episodes} answers{failed})"
        )

    def _summarise(self, controller: Controller, monitor: RunMonitor) -> Summary:
        times, tally = self._timings, controller.tally
        training_s = max(1e-9, times.training_ended - times.training_started)
        rewards = list(monitor.rewards)[-8:]
        stalls = [receipt.stall_s for receipt in tally.updates if receipt.version] or [0.0]
        return Summary(
            name=self._prepared.folder.name,
            folder=str(self._prepared.folder),
            steps=tally.steps,
            samples=tally.samples,
            wall_s=time.monotonic() - times.started,
            training_s=training_s,
            heldout_reward_start=monitor.heldout[0][1] if monitor.heldout else None,
            heldout_reward_end=monitor.heldout[-1][1] if len(monitor.heldout) > 1 else None,
            train_reward_end=sum(rewards) / len(rewards) if rewards else None,
            trainer_idle=max(0.0, 1 - monitor.trainer_busy_s / training_s),
            engine_idle=max(0.0, 1 - times.engine_busy_s / self._config.engine.count / training_s),
            tokens=int(times.tokens),
            tokens_per_s=times.tokens / training_s,
            staleness_mean=monitor.staleness_sum / max(1, tally.steps),
            staleness_max=monitor.staleness_max,
            sync_stall_s=statistics.median(stalls),
            sync_stall_max_s=max(stalls),
            drops=dict(controller.buffer.gate.drops),
            stopped_early=self._stopped,
        )


def _lost_a_worker(work: "asyncio.Task[Summary]") -> bool:
    """Whether the work failed only because a process at the other end of a channel is gone."""
    error = None if work.cancelled() else work.exception()
    return error is not None and isinstance(_innermost(error), ChannelClosed)


async def _unwrapped(work: Awaitable[T]) -> T:
    """Raise what happened instead of the groups that carried it here."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise _innermost(group) from None


def _innermost(error: BaseException) -> BaseException:
    """The most telling error inside nested groups: ours before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_innermost(inner) for inner in error.exceptions]
    for kind in (WorkerDied, UserError, PenstockError):
        for one in found:
            if isinstance(one, kind) and not isinstance(one, ChannelClosed):
                return one
    return found[0]
