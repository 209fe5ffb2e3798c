"""The part of a run in which trainer and engines work: wires the loop, what watches it, and who is replaced.

scorers, rollout workers start ─► version 0 verified ─► evaluate ─► train ─► evaluate
"""

import asyncio
import functools
import gc
from collections.abc import Awaitable, Callable

from penstock.buffer.durable_log import FOLDER as JOURNAL
from penstock.engines.engine_pool import EnginePool
from penstock.interfaces import Scorer
from penstock.observe.event_stream import EventStream
from penstock.observe.run_state import RunState
from penstock.orchestration.assembly import Parts, build_controller, build_evaluator
from penstock.orchestration.beginning import Beginning
from penstock.orchestration.checkpoints import Checkpoints, Part
from penstock.orchestration.controller import Controller
from penstock.orchestration.ending import Ending
from penstock.orchestration.engine_fleet import EngineFleet
from penstock.orchestration.evaluation import EvaluationSchedule
from penstock.orchestration.fleet_size import FleetSize
from penstock.orchestration.kept_work import keep_work
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.remote import RemoteLauncher
from penstock.orchestration.launchers.volunteers import Volunteers
from penstock.orchestration.monitor import RunMonitor
from penstock.orchestration.pooled_workers import PoolCare
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.recovery import undone_groups
from penstock.orchestration.restart_policy import Deaths, RestartPolicy
from penstock.orchestration.resume import BroughtBack
from penstock.orchestration.revival import Revivable, Revival
from penstock.orchestration.rollout_workers import start_episodes
from penstock.orchestration.standing_file import write_standing
from penstock.orchestration.supervision import Mortal, supervised
from penstock.orchestration.trainer_seat import TrainerSeat
from penstock.orchestration.worker_events import EventCollector
from penstock.orchestration.workers import (
    LaunchedEngine,
    LaunchedTrainer,
    Workers,
    start_scorers,
)
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.scoring.retrying import RetryingScorer
from penstock.types import ONE_VERSION


class TrainingPhase:
    """From workers that have started to the last evaluation. `session.py` saves what comes out."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        beginning: Beginning,
        launcher: Launcher,
        workers: Workers,
        stream: EventStream,
        state: RunState,
        ending: Ending,
        collector: EventCollector | None,
        joining: tuple[RemoteLauncher, Volunteers] | None,
        scorer: Scorer | None,
        only_in_python: tuple[Part, ...],
    ) -> None:
        """`joining` is where engines of other machines ask to join; `scorer` a reward that exists only here."""
        self._prepared = prepared
        self._config = prepared.config
        self._beginning = beginning
        self._launcher = launcher
        self._workers = workers
        self._stream = stream
        self._events = stream.of("controller")
        self._state = state
        self._ending = ending
        self._collector = collector
        self._joining = joining
        self._scorer = scorer
        self._only_in_python = only_in_python
        self._built: asyncio.Future[Controller] = asyncio.get_running_loop().create_future()
        self.controller: Controller | None = None
        self.has_begun = False
        """Whether it trains, or has trained."""

    async def free_trainer(self) -> None:
        if self.controller is not None:
            await self.controller.sync.abandon()

    async def run(self) -> None:
        """Start the workers that only training needs, and train while those that die are replaced."""
        engine = EnginePool(
            {one.name: one.calls for one in self._workers.engines},
            resumes=self._config.sync.interrupt not in ONE_VERSION,
            replaces=True,
        )
        fleet = self._fleet(engine)
        await supervised(self._start_pools(fleet, engine), self._mortals(fleet))

    async def _start_pools(self, fleet: EngineFleet, engine: EnginePool) -> None:
        beginning, events = self._beginning, self._events
        care = PoolCare(events, self._collector, self._config.run.freeze_s)
        started = self._scorer or await start_scorers(self._launcher, self._prepared, care)
        scorer = RetryingScorer(started, retries=self._config.reward.retries)
        try:
            kept = await keep_work(
                engine,
                beginning.log,
                beginning.resume,
                interrupt=self._config.sync.interrupt,
                say=events.log,
            )
            episodes = await start_episodes(self._launcher, self._prepared, kept, care)
            try:
                await supervised(self._work(fleet, engine, scorer, episodes), care.watches)
            finally:
                await episodes.close()
        finally:
            await scorer.close()

    def _mortals(self, fleet: EngineFleet) -> list[Mortal]:
        """Whose end ends the run: workers that die too often. A run that must repeat bit by bit ends with any of
        them: what a new process goes on with has other bits."""
        if self._config.run.deterministic:
            return list(self._workers.places)
        trainer = self._workers.trainer
        seat = TrainerSeat(trainer, self._prepared, self._built, self._events.log)
        return [fleet, self._revival(trainer, seat)]

    def _revival(self, worker: LaunchedEngine | LaunchedTrainer, seat: Revivable) -> Revival:
        run, place = self._config.run, worker.place
        deaths = self._workers.deaths.get(place.name) or Deaths(RestartPolicy(max_deaths=run.restarts + 1))
        pulses = {"pulses": self._collector, "freeze_s": run.freeze_s}
        return Revival(place, seat, self._events, deaths, **pulses)  # type: ignore[arg-type]

    def _fleet(self, pool: EnginePool) -> EngineFleet:
        section, workers, launcher = self._config.engine, self._workers, self._launcher
        least = len(workers.engines)
        return EngineFleet(
            list(workers.engines),
            pool,
            self._built,
            another=lambda index: workers.another_engine(index, launcher),
            watch=self._revival,
            size=FleetSize(least, least + section.num_most - section.num_first),
            folder=self._prepared.folder,
            events=self._events,
        )

    async def _work(
        self, fleet: EngineFleet, engine: EnginePool, scorer: Scorer, episodes: EpisodeRunner
    ) -> None:
        config, prepared = self._config, self._prepared
        beginning, workers, events = self._beginning, self._workers, self._events
        checkpoints = self._checkpoints()
        parts = Parts(
            engine=engine,
            trainers=workers.trainer.group,
            scorer=scorer,
            tokenizer=prepared.tokenizer,
            tasks=beginning.tasks,
            episodes=episodes,
            log=beginning.log,
            blobs=workers.blobs,
            checkpoints=checkpoints,
            undone=self._undone(),
        )
        controller = self.controller = build_controller(
            config, parts, resume=beginning.resume, events=self._stream
        )
        self._built.set_result(controller)
        monitor = self._monitor(controller, fleet)
        evaluations = EvaluationSchedule(
            build_evaluator(config, parts, prepared.heldout),
            every=config.eval.every,
            steps=config.run.steps,
            events=events,
            watch=checkpoints,
        )
        await self._train_beside(fleet, controller, evaluations, monitor, checkpoints)

    async def _train_beside(
        self,
        fleet: EngineFleet,
        controller: Controller,
        evaluations: EvaluationSchedule,
        monitor: RunMonitor,
        checkpoints: Checkpoints,
    ) -> None:
        """Evaluate, train, evaluate, while others watch, replace and join."""
        config, saved, events = self._config, self._prepared.saved, self._events
        async with asyncio.TaskGroup() as background:
            beside = [
                background.create_task(monitor.watch()),
                background.create_task(self._ending.hurry_past_frozen(fleet.present, events.log)),
            ]
            if not config.run.deterministic:
                beside.append(background.create_task(fleet.run()))
            if self._joining is not None:
                remote, volunteers = self._joining
                guest = functools.partial(self._workers.another_engine, launcher=remote)
                beside.append(background.create_task(fleet.welcome(volunteers, guest)))
            events.phase("verifying weights")
            await controller.start()
            events.phase("evaluating")
            if saved is None or saved.checkpoint is None:
                await evaluations.now(0)
            await self._train(controller, evaluations, monitor)
            await checkpoints.write_last(controller.stand())
            if controller.steps_done:
                await evaluations.now(controller.steps_done)
            for task in beside:
                task.cancel()

    def _monitor(self, controller: Controller, fleet: EngineFleet) -> RunMonitor:
        workers, folder = self._workers, self._prepared.folder
        return RunMonitor(
            self._stream,
            self._state,
            controller,
            fleet.present,
            watchdog_s=self._config.observe.watchdog_s,
            write_stacks=lambda: [file for place in workers.places if (file := place.write_stacks())],
            keep=lambda lines: write_standing(folder, lines),
        )

    def _undone(self) -> Callable[[int], Awaitable[BroughtBack]] | None:
        beginning, folder, config = self._beginning, self._prepared.folder / JOURNAL, self._config
        log = beginning.log
        if log is None:
            return None
        return lambda step: undone_groups(log, folder, step, config, beginning.tasks)

    def _checkpoints(self) -> Checkpoints:
        run, beginning, state = self._config.run, self._beginning, self._state
        log = beginning.log
        return Checkpoints(
            self._prepared.folder,
            self._workers.trainer.calls,
            beginning.tasks,
            every=run.checkpoint_every,
            keep=run.keep_checkpoints,
            events=self._events,
            heldout=lambda: state.heldout,
            only_in_python=self._only_in_python,
            durable=None if log is None else log.durable,
            covered=None if log is None else log.covered,
        )

    async def _train(
        self, controller: Controller, evaluations: EvaluationSchedule, monitor: RunMonitor
    ) -> None:
        events = self._events
        gc.collect()
        gc.freeze()  # tasks and libraries stay: no need for the collector to walk them between messages
        await monitor.poll()
        self.has_begun = True
        events.phase("training")
        async with asyncio.TaskGroup() as beside:
            evaluating = beside.create_task(evaluations.beside(controller))
            await controller.run()
            evaluating.cancel()
        await monitor.poll()
        events.phase("evaluating")
