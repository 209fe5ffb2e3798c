"""`penstock.train`: what `penstock train` does, from Python, in a script or a notebook."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.loader import build, read_yaml
from penstock.errors import UserError
from penstock.interfaces import Scorer
from penstock.observe.views import Log, View, make_view, show_start
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.gpus import find_gpus
from penstock.orchestration.interruption import asking
from penstock.orchestration.preflight import prepare
from penstock.orchestration.run_folder import SavedRun
from penstock.orchestration.session import Session
from penstock.orchestration.summary import Summary
from penstock.rollout.workflow import Workflow, as_workflow
from penstock.scoring.thread_scorer import ThreadScorer
from penstock.tasks.sources import tasks_from_rows
from penstock.types import Task
from penstock.usercode import describe_callable, stop_if_loading_user_code

Reward = str | Callable[..., Any]
DEMO = Path(__file__).parent / "demo" / "demo.yaml"


def train(
    config: str | Path | Mapping[str, Any] | PenstockConfig | None = None,
    *,
    model: str | None = None,
    tasks: str | Sequence[Task | Mapping[str, Any]] | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    workflow: str | Workflow | Callable[..., Any] | None = None,
    steps: int | None = None,
    **sections: Mapping[str, Any],
) -> Summary:
    """Train a model and return the run's summary.

    `config` is a YAML file, the same as nested dicts, or nothing: with `model`, `tasks` and `reward` given
    that is enough, and with none of them the built-in demo runs. `tasks` is a source as in the config, or
    rows with a `prompt`. `reward` is a function, its import path, or several. `workflow` is what an attempt is:
    `async def workflow(task, rollout)`, an object with such a method `run`, or its path. Other sections are keyword
    arguments: `train(…, rollout={"group_size": 4}, staleness={"max_staleness": 0})`."""
    stop_if_loading_user_code()
    rows = None if tasks is None or isinstance(tasks, str) else tasks_from_rows(tasks)
    functions = (
        [] if reward is None else [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    )
    named = [function if isinstance(function, str) else describe_callable(function) for function in functions]
    path = workflow if isinstance(workflow, str) else _path_of(workflow)
    if path is not None:
        sections = {**sections, "rollout": {**sections.get("rollout", {}), "workflow": path}}
    root = _config(config, model, tasks if isinstance(tasks, str) else None, named, steps, sections)
    view = make_view(root.observe)
    local = [function for function, name in zip(functions, named, strict=True) if name is None]
    scorer: Scorer | None = None
    if local:
        scorer = ThreadScorer.of(root.reward, functions)
        Log(view)("the reward can't be imported by a worker process, so it runs in this one, in a thread")
    own = None if workflow is None or isinstance(workflow, str) else as_workflow(workflow)
    if own is not None and path is None and root.rollout.workers:
        view.log("the workflow can't be imported by a worker process, so it runs in this one")
    return run(root, view, tasks=rows, scorer=scorer, workflow=own)


def run(
    config: PenstockConfig,
    view: View,
    *,
    tasks: Sequence[Task] | None = None,
    scorer: Scorer | None = None,
    workflow: Workflow | None = None,
    saved: SavedRun | None = None,
) -> Summary:
    """Prepare and run one session, also where an event loop already runs (a notebook)."""
    show_start(view, config.run.name, config.run.steps)
    try:
        prepared = prepare(
            config,
            tasks=tasks,
            log=view.log,
            cache=cache_folder(),
            gpus=find_gpus(os.environ),
            workflow=workflow,
            saved=saved,
        )
        return _play(Session(prepared, view, scorer=scorer), view)
    finally:
        with contextlib.suppress(Exception):  # a closed stdout, which must not hide how the run ended
            view.close()


def _play(session: Session, view: View) -> Summary:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_with_signals(session, view))
    return _in_thread(session)


def cache_folder() -> Path:
    """Where models made on the spot are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "penstock"


def _config(
    config: str | Path | Mapping[str, Any] | PenstockConfig | None,
    model: str | None,
    tasks: str | None,
    rewards: Sequence[str | None],
    steps: int | None,
    sections: Mapping[str, Mapping[str, Any]],
) -> PenstockConfig:
    """One config from all that was said, later words over earlier ones."""
    if isinstance(config, PenstockConfig):
        data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    elif isinstance(config, Mapping):
        data = {name: dict(section) for name, section in config.items()}
    elif config is None and model is None and tasks is None and not rewards:
        data = read_yaml(DEMO)
    else:
        data = read_yaml(Path(config)) if config is not None else {}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise UserError(f"{name} must be a section such as {name}={{'key': value}}, got {section!r}")
        data.setdefault(name, {}).update(section)
    if model is not None:
        data.setdefault("model", {})["name"] = model
    if tasks is not None:
        data.setdefault("tasks", {})["source"] = tasks
    if rewards and None not in rewards:
        data.setdefault("reward", {})["functions"] = list(rewards)
    if steps is not None:
        data.setdefault("run", {})["steps"] = steps
    return build(PenstockConfig, data)


def _path_of(workflow: Any) -> str | None:
    """Where a worker process can load the workflow from; None for an object, a closure or a notebook cell."""
    return describe_callable(workflow) if callable(workflow) else None


async def _with_signals(session: Session, view: View) -> Summary:
    """The signals that end a process end the run in order; the second time in a hurry, the third time at once."""
    task = asyncio.current_task()
    assert task is not None
    with asking(session, Log(view), end=task.cancel):
        try:
            return await session.run()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _in_thread(session: Session) -> Summary:
    """A loop of its own in a thread, for callers that are inside one."""
    outcome: list[Summary | BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(session.run()))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="penstock")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        session.stop()
        thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
