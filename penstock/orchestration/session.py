"""One run from its config to its summary: wiring, and nothing but wiring.

prepare ─► workers start ─► version 0 verified ─► evaluate ─► train ─► evaluate ─► save ─► summary
"""

import asyncio
import os
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from penstock.blobs import open_blobs
from penstock.buffer.journal.disk_room import DiskRoom
from penstock.errors import DiskFull
from penstock.interfaces import Scorer
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LOADING, RunEvent
from penstock.observe.readers import ShownRun
from penstock.observe.recorder import Recorder
from penstock.observe.run_state import RunState
from penstock.observe.writers.recoveries_jsonl import NAME as RECOVERIES
from penstock.observe.writers.recoveries_jsonl import RecoveriesWriter
from penstock.orchestration.automatic import sites_of
from penstock.orchestration.beginning import Beginning, begin, what_a_crash_costs
from penstock.orchestration.checkpoints import Part, write_beginning
from penstock.orchestration.closed_loop import starting_bound
from penstock.orchestration.config_file import write_config
from penstock.orchestration.dashboard_door import dashboard
from penstock.orchestration.ending import Ending, Hurried
from penstock.orchestration.kept_checkpoints import checkpoints_of, put_aside_past, sweep_unfinished
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.launcher_choice import kind_of, open_joining
from penstock.orchestration.launchers.launcher_kinds import LauncherParts, open_launcher
from penstock.orchestration.launchers.remote import RemoteLauncher
from penstock.orchestration.launchers.volunteers import Volunteers
from penstock.orchestration.machine_load import machine_load
from penstock.orchestration.monitor import heartbeat
from penstock.orchestration.placement import Environments, sharing
from penstock.orchestration.preflight import Prepared, config_event, open_store, open_writers
from penstock.orchestration.reward_watch import RewardWatch
from penstock.orchestration.run_folder import held, put_aside_rows_past
from penstock.orchestration.shipped_files import files_of_run
from penstock.orchestration.summary import Summary, summarise
from penstock.orchestration.supervision import in_a_sentence, supervised, unwrapped
from penstock.orchestration.training_phase import TrainingPhase
from penstock.orchestration.worker_events import EventCollector
from penstock.orchestration.workers import (
    Workers,
    start_workers,
)


class Session:
    """Owns the processes of one run. `stop` and `hurry` ask it to end early, with the model saved."""

    def __init__(self, prepared: Prepared, shown: ShownRun, *, scorer: Scorer | None = None) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._shown = shown
        self._scorer = scorer
        self._phase: TrainingPhase | None = None
        self._collector: EventCollector | None = None
        self._joining: tuple[RemoteLauncher, Volunteers] | None = None
        self._ending = Ending()
        self._room: DiskRoom | None = None
        """On the disk, from when the model is saved."""

    @property
    def has_begun(self) -> bool:
        """Whether it trains: before, there is nothing to save."""
        return self._phase is not None and self._phase.has_begun

    def stop(self) -> None:
        """End after the step in progress, or now if training has not begun. Safe to call at any time, from any
        thread."""
        if self.has_begun:
            self._ending.stop(self._stop_controller)
            self._ending.call(self._stop_waiting)
        else:
            self.hurry()

    def hurry(self) -> None:
        """End without an evaluation; the trainer still ends its step, and the model is saved. As safe as `stop`."""
        self._ending.hurry()
        self._ending.call(self._stop_waiting)

    def say(self, line: str) -> None:
        """A line for the person who watches, as an event of the run. As safe as `stop`."""
        if not self._ending.call(lambda: self._shown.events.log(line)):
            self._shown.events.log(line)

    def _stop_controller(self) -> None:
        if self._phase is not None and self._phase.controller is not None:
            self._phase.controller.stop()

    @property
    def waits_for_room(self) -> bool:
        """Whether the disk is full, and the model not saved yet."""
        return self._room is not None and self._room.is_full

    def _stop_waiting(self) -> None:
        if self._room is not None:
            self._room.give_up()

    async def run(self) -> Summary:
        with held(self._prepared.folder):
            return await in_a_sentence(self._run(), self._prepared.folder)

    def _take_over(self) -> None:
        """Put the folder of a run that goes on into the order of its checkpoint."""
        saved = self._prepared.saved
        if saved is not None:
            for word in saved.words:
                self.say(word)
            if later := put_aside_past(saved.folder, saved.progress.step):
                aside = ", ".join(map(str, later))
                self.say(
                    f"going back to step {saved.progress.step}: checkpoints of steps {aside} are now in undone/"
                )
            sweep_unfinished(saved.folder)
            put_aside_rows_past(saved.folder, saved.rows_until)
            write_config(saved.folder, self._config)

    async def _run(self) -> Summary:
        self._take_over()
        loop = asyncio.get_running_loop()
        self._ending.bind()
        stream, state = self._shown.stream, self._shown.state
        stream.move_to(loop, loop.call_soon)
        self._shown.keep(open_writers(self._prepared), open_store(self._prepared, state))
        stream.subscribe(RECOVERIES, RecoveriesWriter(self._prepared.folder))
        events = self._shown.events
        stream.emit(self._run_event(loop.time()))
        stream.emit(config_event(self._prepared, loop.time()))
        events.phase(LOADING)
        try:
            with sharing(self._config, self._prepared.gpus, os.environ, events.log) as environments:
                async with (
                    dashboard(self._config.observe, self._prepared.folder, self._shown.tell),
                    heartbeat(events),
                    machine_load(stream, has_gpus=bool(self._prepared.gpus)),
                    EventCollector(stream) as collector,
                    self._open_launcher(events, collector) as launcher,
                    self._open_joining(events, collector) as self._joining,
                ):
                    self._collector = collector
                    await self._train_and_save(launcher, environments, stream, state)
                    await collector.fetch()
            events.phase("done")
            stream.flush()
            summary = summarise(state)
            try:
                summary.write(self._prepared.folder)
            except OSError as error:
                events.log(f"summary.json could not be written: {error}")
            return summary
        finally:
            stream.close()

    def _open_launcher(
        self, events: Recorder, collector: EventCollector
    ) -> AbstractAsyncContextManager[Launcher]:
        prepared = self._prepared
        sites = sites_of(self._config, prepared.gpus)
        first = {f"engine{index}" for index in range(len(self._config.engine.members))}
        parts = LauncherParts(
            config=self._config.launcher,
            folder=prepared.folder,
            files=lambda: files_of_run(prepared, Path.cwd()),
            on_gpu=sites.kinds_on_gpu,
            together=[[f"trainer{rank or ''}" for rank in range(self._config.trainer.parallel.num_ranks)]],
            may_spread=bool(self._config.sync.interface),
            joins=lambda name: kind_of(name) == "engine" and name not in first,
            environ=os.environ,
            log=events.log,
            on_launch=collector.follow,
        )
        return open_launcher(parts)

    def _open_joining(
        self, events: Recorder, collector: EventCollector
    ) -> AbstractAsyncContextManager[tuple[RemoteLauncher, Volunteers] | None]:
        prepared = self._prepared
        return open_joining(
            self._config.launcher,
            prepared.folder,
            files=lambda: files_of_run(prepared, Path.cwd()),
            log=events.log,
            on_launch=collector.follow,
        )

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
        """Once training has begun, the model is saved however it ends, if its trainer lives."""
        events = stream.of("controller")
        async with begin(self._prepared, open_blobs(str(launcher.blobs)), events.log) as beginning:
            if beginning.tasks.curriculum is not None:
                stream.subscribe("curriculum", RewardWatch(beginning.tasks.curriculum))
            run = self._config.run
            if self._prepared.saved is None and (costs := what_a_crash_costs(run, self._only_in_python)):
                events.log(costs)
            if self._prepared.saved is None and run.checkpoint_every > 0:
                bound = starting_bound(self._config.staleness)
                write_beginning(self._prepared.folder, beginning.tasks, bound, self._only_in_python)
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
            starting = start_workers(launcher, beginning.prepared, environments, events)
            workers = await self._ending.unless_hurried(starting)
        except Hurried:
            raise asyncio.CancelledError from None  # there is nothing to save yet
        phase = self._phase = TrainingPhase(
            self._prepared,
            beginning=beginning,
            launcher=launcher,
            workers=workers,
            stream=stream,
            state=state,
            ending=self._ending,
            collector=self._collector,
            joining=self._joining,
            scorer=self._scorer,
            only_in_python=self._only_in_python,
        )
        try:
            await self._ending.unless_hurried(unwrapped(phase.run()))
        except Hurried:
            if not phase.has_begun:
                raise asyncio.CancelledError from None
            await phase.free_trainer()
        except Exception as error:
            await self._rescue(phase, workers, events, error)
            raise
        await self._save(workers, events)

    async def _save(self, workers: Workers, events: Recorder) -> None:
        """On a full disk this waits for room: the trainer alone has what was trained."""
        events.phase("saving")

        async def save() -> None:
            try:
                await workers.trainer.calls.save(str(self._prepared.folder / "model"))
            except DiskFull as error:
                raise DiskFull(f"{error}; if the model stays unsaved, {self._what_is_left()}") from error

        room = self._room = DiskRoom(say=events.log)
        await supervised(room.patiently(save), [workers.trainer.place])

    def _what_is_left(self) -> str:
        """Of what was trained, without the trainer: a sentence that says how to get at it."""
        folder, found = self._prepared.folder, checkpoints_of(self._prepared.folder)
        step = max(found, default=0)
        controller = None if self._phase is None else self._phase.controller
        if found and controller is not None and controller.steps_done == step:
            return f"the checkpoint of step {step} holds the same weights: penstock export {folder} --step {step}"
        if self._config.run.checkpoint_every and not self._only_in_python:
            return f"penstock resume {folder} trains again from step {step}"
        return f"the checkpoint of step {step} is all that is left" if found else "no checkpoint holds it"

    async def _rescue(
        self, phase: TrainingPhase, workers: Workers, events: Recorder, error: Exception
    ) -> None:
        """Save what was trained before the run failed. The failure is what the caller reports; this must not hide
        it."""
        if phase.controller is None or not phase.has_begun:
            return
        events.log(f"the run failed: {error}")
        try:
            await phase.free_trainer()
            await self._save(workers, events)
        except Exception as failure:
            events.log(f"the model could not be saved: {failure}")
        else:
            folder = self._prepared.folder / "model"
            events.log(f"the model of step {phase.controller.steps_done} is saved in {folder}")

    @property
    def _only_in_python(self) -> tuple[Part, ...]:
        own_reward: tuple[Part, ...] = () if self._scorer is None else ("reward",)
        return (*own_reward, *self._prepared.only_in_python)
