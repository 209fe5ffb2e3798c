"""Takes one run from its config to its summary.

the run folder ─► workers ─► controller ─► weights verified ─► evaluate ─► train ─► evaluate ─► save ─► summary
                                 └─ beside it: watch, revive, let engines join and leave
"""

import asyncio
import gc
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from penstock.blob_stores import open_blobs
from penstock.durability.checkpoints import Checkpoints, Part, write_beginning
from penstock.durability.journal.disk_room import DiskRoom
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.durability.recovery import UndoneGroups
from penstock.durability.work_replay import keep_work
from penstock.engines.engine_pool import EnginePool
from penstock.errors import DiskFull
from penstock.loop.adaptive import starting_bound
from penstock.loop.controller import Controller
from penstock.loop.group_log import GroupLog, MemoryGroupLog
from penstock.observe.events import LOADING
from penstock.observe.readers import ShownRun
from penstock.observe.recorder import Recorder
from penstock.observe.writers.recoveries_jsonl import NAME as RECOVERIES
from penstock.observe.writers.recoveries_jsonl import RecoveriesWriter
from penstock.placement.shares import sharing
from penstock.processes.first_start import keep_together
from penstock.processes.pooled_workers import PoolWatches
from penstock.processes.revival import RestartPolicy, Reviver
from penstock.processes.supervision import SupervisedWorker, as_penstock_error, supervised, unwrapped
from penstock.processes.worker_events import EventCollector
from penstock.records import ONE_VERSION
from penstock.records.interfaces import Scorer
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.run.assembly import Parts, build_controller, build_evaluator
from penstock.run.beginning import Beginning, begin, what_a_crash_costs
from penstock.run.engine_fleet import EngineFleet, FleetSize
from penstock.run.evaluation import EvaluationSchedule
from penstock.run.interruption import Ending, RunCancelled
from penstock.run.machine_load import machine_load
from penstock.run.monitor import RunMonitor, heartbeat
from penstock.run.page_server import dashboard
from penstock.run.preflight import Prepared, config_event, open_store, open_writers, run_event
from penstock.run.revived_trainer import RevivableTrainer
from penstock.run.rollout_workers import start_episodes
from penstock.run.run_folder import held, put_in_order
from penstock.run.run_launchers import Launchers, open_launchers
from penstock.run.summary import Summary, summarise
from penstock.run.workers import Workers, start_scorers, start_workers
from penstock.scoring.retrying import RetryingScorer
from penstock.scoring.scoring_process import TrainerState
from penstock.scoring.thread_scorer import LocalScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """Holds what a run uses from before its first worker starts until after its last has ended."""

    collector: EventCollector
    launchers: Launchers
    beginning: Beginning


class Run:
    """Owns the processes of one run. `stop` and `cancel` end it early, with the model saved."""

    def __init__(self, prepared: Prepared, shown: ShownRun, *, scorer: LocalScorer | None = None) -> None:
        """`scorer` is a reward that exists only in this process."""
        self._prepared = prepared
        self._config = prepared.config
        self._shown = shown
        self._scorer = scorer
        self._controller: Controller | None = None
        self._ending = Ending()
        self._room: DiskRoom | None = None
        """Waits for room on the disk, from when the model is saved."""
        self.has_begun = False
        """Whether it trains, or has trained: before that, there is nothing to save."""

    def stop(self) -> None:
        """End after the step in progress, or now if training has not begun. Any thread may call it at any time."""
        if self.has_begun:
            self._ending.stop()
            self._ending.call(self._stop_in_order)
        else:
            self.cancel()

    def cancel(self) -> None:
        """End without an evaluation. The trainer completes its step, and the model is saved."""
        self._ending.cancel()
        self._ending.call(self._stop_waiting)

    def say(self, line: str) -> None:
        """Log a line as an event of the run."""
        if not self._ending.call(partial(self._events.log, line)):
            self._events.log(line)

    @property
    def waits_for_room(self) -> bool:
        """Return whether the disk is full and the model not saved yet."""
        return self._room is not None and self._room.is_full

    def _stop_in_order(self) -> None:
        if self._controller is not None:
            self._controller.stop()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._room is not None:
            self._room.give_up()

    @property
    def _events(self) -> Recorder:
        return self._shown.events

    @property
    def _only_in_python(self) -> tuple[Part, ...]:
        own_reward: tuple[Part, ...] = () if self._scorer is None else ("reward",)
        return (*own_reward, *self._prepared.only_in_python)

    async def run(self) -> Summary:
        with held(self._prepared.folder):
            return await as_penstock_error(self._run(), self._prepared.folder)

    async def _run(self) -> Summary:
        prepared, stream = self._prepared, self._shown.stream
        if prepared.saved is not None:
            put_in_order(prepared.saved, self._config, self.say)
        self._begin_events()
        try:
            await self._train_in_processes()
            self._events.phase("done")
            stream.flush()
            summary = summarise(self._shown.state)
            try:
                summary.write(prepared.folder)
            except OSError as error:
                self._events.log(f"summary.json could not be written: {error}")
            return summary
        finally:
            stream.close()

    def _begin_events(self) -> None:
        prepared, stream, loop = self._prepared, self._shown.stream, asyncio.get_running_loop()
        self._ending.bind()
        stream.move_to(loop, loop.call_soon)
        self._shown.keep(open_writers(prepared), open_store(prepared, self._shown.state))
        stream.subscribe(RECOVERIES, RecoveriesWriter(prepared.folder))
        stream.emit(run_event(prepared, loop.time()))
        stream.emit(config_event(prepared, loop.time()))
        self._events.phase(LOADING)

    async def _train_in_processes(self) -> None:
        config, prepared, stream, events = self._config, self._prepared, self._shown.stream, self._events
        with sharing(config, prepared.gpus, os.environ, events.log) as environments:
            async with (
                dashboard(config.observe, prepared.folder, self._shown.tell),
                heartbeat(events),
                machine_load(stream, has_gpus=bool(prepared.gpus)),
                EventCollector(stream) as collector,
                open_launchers(prepared, events, collector) as launchers,
                begin(prepared, open_blobs(str(launchers.own.blobs)), events.log) as beginning,
            ):
                opened = _Opened(collector=collector, launchers=launchers, beginning=beginning)
                self._begin_tasks(beginning)
                starting = start_workers(launchers.own, beginning.prepared, environments, events)
                try:
                    workers = await self._ending.unless_cancelled(starting)
                except RunCancelled:
                    raise asyncio.CancelledError from None  # there is nothing to save yet
                await self._train_and_save(opened, workers)
                await collector.fetch()

    def _begin_tasks(self, beginning: Beginning) -> None:
        """Subscribe the curriculum. A new run reports what a crash would cost and makes its step 0 resumable."""
        config, tasks = self._config, beginning.tasks
        if tasks.curriculum is not None:
            self._shown.stream.subscribe("curriculum", tasks.curriculum)
        if self._prepared.saved is not None:
            return
        if costs := what_a_crash_costs(config.run, self._only_in_python):
            self._events.log(costs)
        if config.run.checkpoint_every > 0:
            bound = starting_bound(config.staleness)
            write_beginning(self._prepared.folder, tasks, bound, self._only_in_python)

    async def _train_and_save(self, opened: _Opened, workers: Workers) -> None:
        """Train, and save the model however training ends once it has begun, if the trainer lives."""
        try:
            await self._ending.unless_cancelled(unwrapped(self._train(opened, workers)))
        except RunCancelled:
            if not self.has_begun:
                raise asyncio.CancelledError from None
            await self._free_trainer()
        except Exception as error:
            await self._rescue(workers, error)
            raise
        await self._save(workers)

    async def _train(self, opened: _Opened, workers: Workers) -> None:
        """Start the workers that only training needs, build the controller, and train."""
        config, prepared, beginning = self._config, self._prepared, opened.beginning
        resumes = config.sync.interrupt not in ONE_VERSION
        calls = {one.name: one.calls for one in workers.engines}
        engines = EnginePool(calls, resumes=resumes, replaces=True, load_share=config.sync.load_share)
        pool_watches = PoolWatches(self._events, opened.collector, config.run.freeze_s)
        async with AsyncExitStack() as at_end:
            pools = self._start_pools(opened, engines, pool_watches, at_end)
            scorer, episodes = await keep_together(workers.starts, pools, self._events)
            journal, log = beginning.log, beginning.log or MemoryGroupLog()
            parts = Parts(
                engines=engines,
                trainers=workers.trainer.group,
                scorer=scorer,
                tokenizer=prepared.tokenizer,
                tasks=beginning.tasks,
                episodes=episodes,
                log=log,
                blobs=workers.blobs,
                checkpoints=self._checkpoints(beginning, workers, log),
                trained_groups=None
                if journal is None
                else UndoneGroups(journal, prepared.folder, config, beginning.tasks),
            )
            controller = build_controller(config, parts, resume=beginning.resume, events=self._shown.stream)
            self._controller = controller
            fleet, watches = self._watches(opened, workers, engines, controller)
            work = self._train_beside(opened, workers, parts, controller, fleet)
            await supervised(work, [*pool_watches.watches, *watches])

    async def _start_pools(
        self, opened: _Opened, engines: EnginePool, pool_watches: PoolWatches, at_end: AsyncExitStack
    ) -> tuple[Scorer, EpisodeRunner]:
        """Start the scorers and the rollout workers; `at_end` closes them."""
        config, prepared, events = self._config, self._prepared, self._events
        launcher, beginning, state = opened.launchers.own, opened.beginning, self._shown.state
        started = self._scorer or await start_scorers(launcher, prepared, pool_watches)
        started.training = lambda: TrainerState(global_step=state.step, max_steps=state.steps_planned)
        scorer = RetryingScorer(started, retries=config.reward.retries)
        at_end.push_async_callback(scorer.close)
        kept = keep_work(
            engines,
            beginning.log,
            beginning.resume,
            interrupt=config.sync.interrupt,
            records_routing=config.engine.record_routing == "on",
            say=events.log,
        )
        episodes = await start_episodes(launcher, prepared, kept, pool_watches)
        at_end.push_async_callback(episodes.close)
        return scorer, episodes

    def _checkpoints(self, beginning: Beginning, workers: Workers, log: GroupLog) -> Checkpoints:
        run = self._config.run
        return Checkpoints(
            self._prepared.folder,
            workers.trainer.calls,
            beginning.tasks,
            every=run.checkpoint_every,
            keep=run.keep_checkpoints,
            events=self._events,
            heldout=lambda: self._shown.state.heldout,
            only_in_python=self._only_in_python,
            log=log,
        )

    def _watches(
        self, opened: _Opened, workers: Workers, engines: EnginePool, controller: Controller
    ) -> tuple[EngineFleet, list[SupervisedWorker]]:
        """Return the fleet of engines, and the supervised workers whose end ends the run: they have died too often.

        A run that must repeat bit by bit ends with any worker, since a new process would compute other bits.
        """
        config, events, section = self._config, self._events, self._config.engine
        reviver = Reviver(
            events=events,
            policy=RestartPolicy(max_deaths=config.run.restarts + 1),
            deaths=workers.deaths,
            pulses=opened.collector,
            freeze_s=config.run.freeze_s,
        )
        least = len(workers.engines)
        fleet = EngineFleet(
            list(workers.engines),
            engines,
            controller,
            make=workers.another_engine,
            launcher=opened.launchers.own,
            reviver=reviver,
            size=FleetSize(least, least + section.num_most - section.num_first),
            folder=self._prepared.folder,
            events=events,
        )
        if config.run.deterministic:
            return fleet, list(workers.places)
        trainer = RevivableTrainer(workers.trainer, self._prepared.folder, controller, events)
        return fleet, [fleet, reviver.over(workers.trainer.place, trainer)]

    def _monitor(self, workers: Workers, controller: Controller, fleet: EngineFleet) -> RunMonitor:
        return RunMonitor(
            self._shown.stream,
            self._shown.state,
            controller,
            fleet.present,
            watchdog_s=self._config.observe.watchdog_s,
            workers=workers.places,
            folder=self._prepared.folder,
        )

    def _evaluations(self, parts: Parts) -> EvaluationSchedule:
        return EvaluationSchedule(
            build_evaluator(self._config, parts, self._prepared.heldout),
            every=self._config.eval.every,
            steps=self._config.run.steps,
            events=self._events,
            watch=parts.checkpoints,
        )

    async def _train_beside(
        self, opened: _Opened, workers: Workers, parts: Parts, controller: Controller, fleet: EngineFleet
    ) -> None:
        """Evaluate, train and evaluate, beside the monitor and the engines that join and leave."""
        saved, events, checkpoints = self._prepared.saved, self._events, parts.checkpoints
        monitor, evaluations = self._monitor(workers, controller, fleet), self._evaluations(parts)
        watching = [monitor.watch(), self._ending.cancel_past_frozen(fleet.present, events.log)]
        if not self._config.run.deterministic:
            watching.append(fleet.run())
        if opened.launchers.joining is not None:
            remote, volunteers = opened.launchers.joining
            watching.append(fleet.welcome(volunteers, remote))
        async with asyncio.TaskGroup() as background:
            beside = [background.create_task(one) for one in watching]
            events.phase("verifying weights")
            await controller.start()
            events.phase("evaluating")
            if saved is None or saved.checkpoint is None:
                await evaluations.now(0)
            gc.collect()
            gc.freeze()  # tasks and libraries stay: no need for the collector to walk them between messages
            await monitor.poll()
            self.has_begun = True
            events.phase("training")
            async with asyncio.TaskGroup() as training:
                evaluating = training.create_task(evaluations.beside(controller))
                await controller.run()
                evaluating.cancel()
            await monitor.poll()
            events.phase("evaluating")
            assert checkpoints is not None
            await checkpoints.write_last(controller.resume_point())
            if controller.steps_done:
                await evaluations.now(controller.steps_done)
            for task in beside:
                task.cancel()

    async def _free_trainer(self) -> None:
        """Stop waiting for engines to read the trainer's weights; until then it could not save them."""
        if self._controller is not None:
            await self._controller.sync.abandon()

    async def _save(self, workers: Workers) -> None:
        """Save the model. A full disk is waited out, since only the trainer has what was trained."""
        self._events.phase("saving")

        async def save() -> None:
            try:
                await workers.trainer.calls.save(str(self._prepared.folder / "model"))
            except DiskFull as error:
                raise DiskFull(f"{error}; if the model stays unsaved, {self._what_is_left()}") from error

        self._room = DiskRoom(say=self._events.log)
        await supervised(self._room.patiently(save), [workers.trainer.place])

    def _what_is_left(self) -> str:
        folder, found = self._prepared.folder, checkpoints_of(self._prepared.folder)
        step = max(found, default=0)
        if found and self._controller is not None and self._controller.steps_done == step:
            return f"the checkpoint of step {step} holds the same weights: penstock export {folder} --step {step}"
        if self._config.run.checkpoint_every and not self._only_in_python:
            return f"penstock resume {folder} trains again from step {step}"
        return f"the checkpoint of step {step} is all that is left" if found else "no checkpoint holds it"

    async def _rescue(self, workers: Workers, error: Exception) -> None:
        """Save what was trained before the run failed. An error here must not hide the failure."""
        if self._controller is None or not self.has_begun:
            return
        self._events.log(f"the run failed: {error}")
        try:
            await self._free_trainer()
            await self._save(workers)
        except Exception as failure:
            self._events.log(f"the model could not be saved: {failure}")
        else:
            folder = self._prepared.folder / "model"
            self._events.log(f"the model of step {self._controller.steps_done} is saved in {folder}")
