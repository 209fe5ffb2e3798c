"""Provides `penstock.train`: the command `penstock train` as a function, for scripts and notebooks."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.config.root import PenstockConfig
from penstock.observe.events import RunEvent
from penstock.observe.readers import ShownRun, show
from penstock.observe.views import View, make_view
from penstock.placement.gpus import find_gpus
from penstock.rollout.workflow import Workflow, as_workflow
from penstock.run.arguments import DEMO, NAMED, Config, Rewards, Tasks, read_arguments
from penstock.run.interruption import Stoppable, asking, asking_from_a_thread
from penstock.run.preflight import prepare
from penstock.run.run import Run
from penstock.run.run_folder import SavedRun
from penstock.run.summary import Summary
from penstock.scoring.thread_scorer import ThreadScorer
from penstock.tasks.task_rows import Row
from penstock.usercode import describe_callable, stop_if_loading_user_code

__all__ = ["DEMO", "RunRequest", "cache_folder", "run", "train", "train_async"]


def train(
    config: Config | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    tasks: Tasks | None = None,
    eval_tasks: Tasks | None = None,
    reward: Rewards | None = None,
    workflow: str | Workflow | Callable[..., Any] | None = None,
    steps: int | None = None,
    **sections: Mapping[str, Any],
) -> Summary:
    """Train a model and return the run's summary.

    `config` is a YAML file, the same as nested dicts, or None. Without it, `model`, `tasks` and `reward` are
    enough; if none of these is given, the built-in demo runs. `tasks` is a source as in the config, rows with
    a `prompt`, or the section with rows in it: `{"rows": rows, "as_chat": True, "limit": 100}`. `eval_tasks`
    takes the same forms for held-out tasks; its rows are read with the settings of `tasks` unless it has its
    own. `reward` is a function, its import path, `(function, weight)`, a list of these, or a mapping from
    names: `{"style": (function, 0.5)}`. `workflow` runs one attempt at a task: `async def workflow(task,
    rollout)`, an object with such a method `run`, or its path. Other sections are keyword arguments, merged
    into `config` key by key: `train(…, rollout={"group_size": 4}, staleness={"max_staleness": 0})`.

    `train` also works where an event loop already runs (a notebook), and blocks it; `train_async` does not
    block. An interrupt ends the run after the step in progress: the model is saved and the summary returned.
    """
    stop_if_loading_user_code()
    return RunRequest.of(
        config,
        workflow,
        sections,
        model=model,
        tasks=tasks,
        eval_tasks=eval_tasks,
        reward=reward,
        steps=steps,
    ).blocking()


async def train_async(
    config: Config | None = None,
    *,
    workflow: str | Workflow | Callable[..., Any] | None = None,
    **arguments: Any,
) -> Summary:
    """Train without blocking the caller's event loop. Takes the same arguments as `train`.

    When its task is cancelled, it saves the model before it raises the cancellation; a second cancellation
    skips the save.
    """
    stop_if_loading_user_code()
    own = {name: arguments.pop(name) for name in NAMED if name in arguments}
    return await RunRequest.of(config, workflow, arguments, **own).beside()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Holds everything that a run is made from."""

    config: PenstockConfig
    view: View
    tasks: Iterable[Row] | None = None
    heldout: Iterable[Row] | None = None
    scorer: ThreadScorer | None = None
    workflow: Workflow | None = None
    saved: SavedRun | None = None
    notes: tuple[str, ...] = ()
    """Lines about the arguments, for the log."""

    @classmethod
    def of(
        cls,
        config: Config | None,
        workflow: str | Workflow | Callable[..., Any] | None,
        sections: Mapping[str, Mapping[str, Any]],
        **named: Any,
    ) -> "RunRequest":
        path = workflow if isinstance(workflow, str) else _path_of(workflow)
        if path is not None:
            sections = {**sections, "rollout": {**sections.get("rollout", {}), "workflow": path}}
        arguments = read_arguments(config, sections=sections, **named)
        root = arguments.config
        notes: list[str] = []
        scorer: ThreadScorer | None = None
        if arguments.local_rewards:
            device = root.reward.device
            scorer = ThreadScorer.of(
                root.reward, [one.in_this_process(device) for one in arguments.local_rewards]
            )
            notes.append(
                "the reward can't be imported by a worker process, so it runs in this one, in a thread, where no "
                "limit of CPU time or memory holds"
            )
        own = None if workflow is None or isinstance(workflow, str) else as_workflow(workflow)
        if own is not None and path is None:
            notes.append(
                "the workflow can't be imported by a worker process, so it runs in this one, where no limit of CPU "
                "time or memory holds"
            )
        return cls(
            config=root,
            view=make_view(root.observe),
            tasks=arguments.tasks,
            heldout=arguments.heldout,
            scorer=scorer,
            workflow=own,
            notes=tuple(notes),
        )

    def prepare(self, shown: ShownRun) -> Run:
        prepared = prepare(
            self.config,
            tasks=self.tasks,
            heldout=self.heldout,
            log=shown.events.log,
            cache=cache_folder(),
            gpus=find_gpus(os.environ),
            workflow=self.workflow,
            saved=self.saved,
        )
        return Run(prepared, shown, scorer=self.scorer)

    def blocking(self) -> Summary:
        """Prepare and run, even where an event loop already runs (a notebook)."""
        with self._shown() as shown:
            run = self.prepare(shown)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(_with_signals(run))
            return run_in_thread(run, run.say)

    async def beside(self) -> Summary:
        """Prepare and run in the caller's event loop."""
        with self._shown() as shown:
            return await run_until_cancelled(await asyncio.to_thread(self.prepare, shown))

    @contextlib.contextmanager
    def _shown(self) -> Iterator[ShownRun]:
        """Announce the run at once, since reading tasks and a tokenizer can take seconds."""
        shown, run = show(self.view), self.config.run
        events = shown.events
        events.emit(
            RunEvent(
                process=events.process,
                time=events.now(),
                name=run.name,
                folder="",
                steps=run.steps,
                wall_s=time.time(),
            )
        )
        for note in self.notes:
            events.log(note)
        if self.saved is not None:
            events.log(f"resuming from step {self.saved.progress.step} of {run.steps}")
        try:
            yield shown
        finally:
            shown.stream.close()


def run(config: PenstockConfig, view: View, *, saved: SavedRun | None = None) -> Summary:
    """Prepare and run a config; a `saved` run resumes."""
    return RunRequest(config=config, view=view, saved=saved).blocking()


def cache_folder() -> Path:
    """Return the folder that caches models made on demand."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "penstock"


def _path_of(workflow: Any) -> str | None:
    """Return the path by which a worker process can load the workflow; None for an object, a closure or a
    notebook cell."""
    return describe_callable(workflow) if callable(workflow) else None


async def _with_signals(run: Run) -> Summary:
    """Run to the end. A first signal ends the run in order, a second without an evaluation, a third at once."""
    task = asyncio.current_task()
    assert task is not None
    with asking(run, run.say, end=task.cancel):
        try:
            return await run.run()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


class Runnable(Stoppable, Protocol):
    """Declares what is needed of a `Run` to run it in a thread or beside other work."""

    async def run(self) -> Summary: ...


def run_in_thread(run: Runnable, log: Callable[[str], None]) -> Summary:
    """Run in a thread with an event loop of its own.

    The caller's first interrupt asks for an orderly end and the second for a quick one, and both return the
    summary. The third ends the run at once.
    """
    outcome: Future[Summary] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Summary]]] = Future()

    async def run_here() -> Summary:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await run.run()

    def work() -> None:
        try:
            outcome.set_result(asyncio.run(run_here()))
        except BaseException as error:
            outcome.set_exception(error)

    def end() -> None:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)

    with asking_from_a_thread(run, log, end=end):
        threading.Thread(target=work, name="penstock").start()
        return _result(outcome)


def _result(outcome: "Future[Summary]") -> Summary:
    try:
        return outcome.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def run_until_cancelled(run: Runnable) -> Summary:
    """Run in this event loop. A cancellation waits until the model is saved; a second one does not."""
    running = asyncio.create_task(run.run())
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if running.done():
            raise
        run.cancel()
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error from None
        raise
