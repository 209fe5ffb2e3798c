"""One run from its config to its summary: wiring, and nothing but wiring.

prepare ─► workers start ─► version 0 verified ─► evaluate ─► train ─► evaluate ─► save ─► summary
"""

import asyncio
import gc
import os
import statistics
import time
from dataclasses import dataclass

from penstock.engines.engine_pool import EnginePool
from penstock.interfaces import Engine, Scorer
from penstock.observe.views import View
from penstock.orchestration.assembly import Parts, build_controller, build_evaluator
from penstock.orchestration.capabilities import check_capabilities
from penstock.orchestration.controller import Controller
from penstock.orchestration.evaluation import EvaluationSchedule
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.local import LocalLauncher
from penstock.orchestration.monitor import RunMonitor
from penstock.orchestration.placement import scorer_environment, sharing
from penstock.orchestration.preflight import Prepared, open_writers
from penstock.orchestration.summary import Summary
from penstock.orchestration.supervision import supervised, unwrapped
from penstock.orchestration.workers import LaunchedScorer, Workers, scorer_place, start_workers
from penstock.rollout.group_runner import Workflow
from penstock.scoring.scorer_pool import ScorerPool
from penstock.tasks.stream import TaskStream


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
                    workers = await unwrapped(start_workers(launcher, self._prepared, environments))
                    scorer = self._scorer or await self._start_scorers(launcher)
                    try:
                        return await supervised(self._work(workers, scorer, monitor), workers.places)
                    finally:
                        await scorer.close()
        finally:
            for writer in writers:
                writer.close()
            self._view.close()

    async def _start_scorers(self, launcher: Launcher) -> ScorerPool:
        reward = self._config.reward
        environment = scorer_environment(reward.device, self._prepared.gpus, os.environ)
        places = [
            scorer_place(launcher, f"scorer{i}", self._config, environment) for i in range(reward.workers)
        ]
        await asyncio.gather(*(place.start() for place in places))
        return ScorerPool([LaunchedScorer(place) for place in places], timeout_s=reward.timeout_s)

    async def _work(self, workers: Workers, scorer: Scorer, monitor: RunMonitor) -> Summary:
        engine = EnginePool({one.name: one for one in workers.engines})
        check_capabilities(self._config, await engine.reports())
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
        evaluations = EvaluationSchedule(
            build_evaluator(config, parts, prepared.heldout),
            every=config.eval.every,
            steps=config.run.steps,
            on_result=monitor.on_evaluation,
            log=monitor.log,
        )
        async with asyncio.TaskGroup() as background:
            watching = background.create_task(monitor.watch(controller, workers.engines))
            monitor.phase = "verifying weights"
            await controller.start()
            monitor.phase = "evaluating"
            if not self._stopped:
                await evaluations.now(0)
            if not self._stopped:
                await self._train(controller, evaluations, monitor, engine)
            monitor.phase = "evaluating"
            if controller.tally.steps:
                await evaluations.now(controller.tally.steps)
            monitor.phase = "saving"
            await workers.trainer.save(str(self._prepared.folder / "model"))
            watching.cancel()
        summary = self._summarise(controller, monitor)
        summary.write(self._prepared.folder)
        return summary

    async def _train(
        self, controller: Controller, evaluations: EvaluationSchedule, monitor: RunMonitor, engine: Engine
    ) -> None:
        monitor.phase = "training"
        gc.collect()
        gc.freeze()  # tasks and libraries stay: no need for the collector to walk them between messages
        before = (await engine.report()).counters
        self._timings.training_started = time.monotonic()
        async with asyncio.TaskGroup() as beside:
            evaluating = beside.create_task(evaluations.beside(controller))
            await controller.run()
            evaluating.cancel()
        self._timings.training_ended = time.monotonic()
        after = (await engine.report()).counters
        self._timings.engine_busy_s = after["busy_s"] - before["busy_s"]
        self._timings.tokens = after["tokens"] - before["tokens"]

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
