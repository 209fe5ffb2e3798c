"""One run from its config to its summary: wiring, and nothing but wiring.

prepare ─► workers start ─► version 0 verified ─► evaluate ─► train ─► evaluate ─► save ─► summary
"""

import asyncio
import gc
import os
import time

from penstock.blobs import open_blobs
from penstock.engines.engine_pool import EnginePool
from penstock.interfaces import Scorer
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LOADING, RunEvent
from penstock.observe.readers import ShownRun
from penstock.observe.recorder import Recorder
from penstock.observe.run_state import RunState
from penstock.orchestration.assembly import Parts, build_controller, build_evaluator
from penstock.orchestration.beginning import Beginning, begin
from penstock.orchestration.capabilities import check_capabilities
from penstock.orchestration.checkpoints import Checkpoints, Part, sweep_unfinished
from penstock.orchestration.controller import Controller
from penstock.orchestration.ending import Ending, Hurried
from penstock.orchestration.evaluation import EvaluationSchedule
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.local import LocalLauncher
from penstock.orchestration.monitor import RunMonitor, heartbeat
from penstock.orchestration.placement import Environments, sharing
from penstock.orchestration.preflight import Prepared, open_samples, open_writers, to_yaml
from penstock.orchestration.rollout_workers import start_episodes
from penstock.orchestration.run_folder import held, put_aside_rows_past
from penstock.orchestration.summary import Summary, summarise
from penstock.orchestration.supervision import Mortal, WhileNeeded, supervised, unwrapped
from penstock.orchestration.worker_events import EventCollector
from penstock.orchestration.workers import Workers, start_scorers, start_workers
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.safe_files import write_private


class Session:
    """Owns the processes of one run. `stop` and `hurry` ask it to end early, with the model saved."""

    def __init__(self, prepared: Prepared, shown: ShownRun, *, scorer: Scorer | None = None) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._shown = shown
        self._scorer = scorer
        self._controller: Controller | None = None
        self._ending = Ending()

    def stop(self) -> None:
        """End after the step in progress. Safe to call at any time, from any thread."""
        self._ending.stop(self._stop_controller)

    def hurry(self) -> None:
        """End without an evaluation; the trainer still ends its step, and the model is saved. As safe as `stop`."""
        self._ending.hurry()

    def say(self, line: str) -> None:
        """A line for the person who watches, as an event of the run. As safe as `stop`."""
        if not self._ending.call(lambda: self._shown.events.log(line)):
            self._shown.events.log(line)

    def _stop_controller(self) -> None:
        if self._controller is not None:
            self._controller.stop()

    async def run(self) -> Summary:
        with held(self._prepared.folder):
            self._take_over()
            return await self._run()

    def _take_over(self) -> None:
        """Put the folder of a run that goes on into the order of its checkpoint."""
        saved = self._prepared.saved
        if saved is not None:
            sweep_unfinished(saved.folder)
            put_aside_rows_past(saved.folder, saved.progress.step)
            write_private(saved.folder / "config.yaml", to_yaml(self._config))

    async def _run(self) -> Summary:
        loop = asyncio.get_running_loop()
        self._ending.bind()
        stream, state = self._shown.stream, self._shown.state
        stream.move_to(loop, loop.call_soon)
        self._shown.keep(open_writers(self._prepared), open_samples(self._prepared))
        events = self._shown.events
        stream.emit(self._run_event(loop.time()))
        events.phase(LOADING)
        try:
            with sharing(self._config, self._prepared.gpus, os.environ, events.log) as environments:
                async with (
                    heartbeat(events),
                    EventCollector(stream) as collector,
                    LocalLauncher(self._prepared.folder / "logs", on_launch=collector.follow) as launcher,
                ):
                    await self._train_and_save(launcher, environments, stream, state)
                    await collector.fetch()
            events.phase("done")
            stream.flush()
            summary = summarise(state)
            summary.write(self._prepared.folder)
            return summary
        finally:
            stream.close()

    def _run_event(self, now: float) -> RunEvent:
        folder, saved = self._prepared.folder, self._prepared.saved
        return RunEvent(
            process="controller",
            time=now,
            name=folder.name,
            folder=str(folder),
            steps=self._config.run.steps,
            wall_s=time.time(),
            step=0 if saved is None else saved.progress.step,
            heldout=() if saved is None else saved.progress.rewards,
        )

    async def _train_and_save(
        self, launcher: Launcher, environments: Environments, stream: EventStream, state: RunState
    ) -> None:
        """However training ends, the model is saved if its trainer lives."""
        events = stream.of("controller")
        async with begin(self._prepared, open_blobs(str(launcher.blobs)), events.log) as beginning:
            await self._train_from(beginning, launcher, environments, stream, state)

    async def _train_from(
        self,
        beginning: Beginning,
        launcher: Launcher,
        environments: Environments,
        stream: EventStream,
        state: RunState,
    ) -> None:
        events = stream.of("controller")
        try:
            starting = unwrapped(start_workers(launcher, beginning.prepared, environments))
            workers = await self._ending.unless_hurried(starting)
        except Hurried:
            raise asyncio.CancelledError from None  # there is nothing to save yet
        try:
            await self._ending.unless_hurried(self._with_scorers(beginning, launcher, workers, stream, state))
        except Hurried:
            await self._free_trainer()
        except Exception as error:
            await self._rescue(workers, events, error)
            raise
        await self._save(workers, events)

    async def _save(self, workers: Workers, events: Recorder) -> None:
        events.phase("saving")
        saving = workers.trainer.save(str(self._prepared.folder / "model"))
        await supervised(saving, [workers.trainer.place])

    async def _rescue(self, workers: Workers, events: Recorder, error: Exception) -> None:
        """Save what was trained before the run failed. The failure is what the caller reports; this must not hide
        it."""
        if self._controller is None:
            return
        events.log(f"the run failed: {error}")
        try:
            await self._free_trainer()
            await self._save(workers, events)
        except Exception as failure:
            events.log(f"the model could not be saved: {failure}")
        else:
            folder = self._prepared.folder / "model"
            events.log(f"the model of step {self._controller.steps_done} is saved in {folder}")

    async def _free_trainer(self) -> None:
        if self._controller is not None:
            await self._controller.sync.abandon()

    async def _with_scorers(
        self,
        beginning: Beginning,
        launcher: Launcher,
        workers: Workers,
        stream: EventStream,
        state: RunState,
    ) -> None:
        scorer = self._scorer or await start_scorers(launcher, self._prepared)
        engine = EnginePool({one.name: one for one in workers.engines})
        episodes = await start_episodes(launcher, self._prepared, engine)
        work = self._work(beginning, workers, engine, scorer, episodes, stream, state)
        try:
            await supervised(work, self._mortals(workers, engine))
        finally:
            await episodes.close()
            await scorer.close()

    def _mortals(self, workers: Workers, pool: EnginePool) -> list[Mortal]:
        """Whose end ends the run. An engine that was expelled from the pool may end."""
        engines = [
            WhileNeeded(engine.place, lambda name=engine.name: name in pool.names)  # type: ignore[misc]
            for engine in workers.engines
        ]
        return [workers.trainer.place, *engines]

    async def _work(
        self,
        beginning: Beginning,
        workers: Workers,
        engine: EnginePool,
        scorer: Scorer,
        episodes: EpisodeRunner,
        stream: EventStream,
        state: RunState,
    ) -> None:
        check_capabilities(self._config, await engine.reports())
        config, prepared = self._config, self._prepared
        events, saved = stream.of("controller"), prepared.saved
        checkpoints = self._checkpoints(beginning, workers, events, state)
        parts = Parts(
            engine=engine,
            trainers=[workers.trainer],
            scorer=scorer,
            tokenizer=prepared.tokenizer,
            tasks=beginning.tasks,
            episodes=episodes,
            log=beginning.log,
            blobs=workers.blobs,
            checkpoints=checkpoints,
        )
        controller = self._controller = build_controller(
            config, parts, resume=beginning.resume, events=stream
        )
        monitor = RunMonitor(stream, state, controller, workers.engines, watchdog_s=config.observe.watchdog_s)
        evaluations = EvaluationSchedule(
            build_evaluator(config, parts, prepared.heldout),
            every=config.eval.every,
            steps=config.run.steps,
            events=events,
        )
        async with asyncio.TaskGroup() as background:
            beside = [
                background.create_task(monitor.watch()),
                background.create_task(self._ending.hurry_past_frozen(workers.engines, events.log)),
            ]
            events.phase("verifying weights")
            await controller.start()
            events.phase("evaluating")
            if not self._ending.is_stopped and saved is None:
                await evaluations.now(0)
            if not self._ending.is_stopped:
                await self._train(controller, evaluations, monitor, events)
                await checkpoints.write_last(controller.stand())
            if controller.steps_done:
                await evaluations.now(controller.steps_done)
            for task in beside:
                task.cancel()

    def _checkpoints(
        self, beginning: Beginning, workers: Workers, events: Recorder, state: RunState
    ) -> Checkpoints:
        run, prepared = self._config.run, self._prepared
        own_reward: tuple[Part, ...] = () if self._scorer is None else ("reward",)
        return Checkpoints(
            prepared.folder,
            workers.trainer,
            beginning.tasks,
            every=run.checkpoint_every,
            keep=run.keep_checkpoints,
            events=events,
            heldout=lambda: state.heldout,
            only_in_python=(*own_reward, *prepared.only_in_python),
            covered=None if beginning.log is None else beginning.log.covered,
        )

    async def _train(
        self, controller: Controller, evaluations: EvaluationSchedule, monitor: RunMonitor, events: Recorder
    ) -> None:
        gc.collect()
        gc.freeze()  # tasks and libraries stay: no need for the collector to walk them between messages
        await monitor.poll()
        events.phase("training")
        async with asyncio.TaskGroup() as beside:
            evaluating = beside.create_task(evaluations.beside(controller))
            await controller.run()
            evaluating.cancel()
        await monitor.poll()
        events.phase("evaluating")
