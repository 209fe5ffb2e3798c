"""Defines workflows: a workflow turns a task into turns, which it generates through its rollout.

    async def workflow(task, rollout):
        turn = await rollout.generate(task.prompt)
        if not right(turn.text):
            await rollout.generate(rollout.continue_(turn, "Look again."))

A workflow is such a function, or an object with a method `run(task, rollout)`. It returns one of these: an
`Episode`; a `Turn`, which stands for itself and the turns that it continues; None, which stands for all
turns; a number or a `Score`, which is the reward of all turns. A command or a URL can be a workflow too.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from penstock.errors import UserError
from penstock.http_server.http_calls import HttpConfig, is_url
from penstock.records import Episode, Score, Task, Turn
from penstock.rollout.command_workflow import CommandWorkflow
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.http_environment import HttpEnvironment
from penstock.usercode import is_command, load_object

Result = Episode | Turn | Score | float | None


class Workflow(Protocol):
    """Makes attempts at tasks. One object runs many episodes at once, so it must not keep state of an episode."""

    def run(self, task: Task, rollout: Rollout) -> Awaitable[Result]:
        """Attempt the task with turns that `rollout` generates. An exception makes the episode a failed one."""


class SingleTurn:
    """Answers the prompt with one turn: the default workflow."""

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        return await rollout.generate(task.prompt)


class FunctionWorkflow:
    """Wraps a function as a workflow."""

    def __init__(self, function: Callable[[Task, Rollout], Awaitable[Result]]) -> None:
        self._function = function

    async def run(self, task: Task, rollout: Rollout) -> Result:
        return await self._function(task, rollout)


class Workflows:
    """Holds the run's workflow and those that tasks name, each loaded once."""

    def __init__(self, default: Workflow | None = None, http: HttpConfig | None = None) -> None:
        self._default: Workflow = default or SingleTurn()
        self._http = http
        self._by_path: dict[str, Workflow] = {}

    def of(self, task: Task) -> Workflow:
        path = task.workflow
        if path is None:
            return self._default
        if path not in self._by_path:
            self._by_path[path] = load_workflow(path, self._http)
        return self._by_path[path]

    def check(self, tasks: Iterable[Task]) -> bool:
        """Load the workflows that tasks name, so that a wrong path is found before anything starts. Return
        whether any task names one."""
        named = [task for task in tasks if task.workflow is not None]
        for task in named:
            try:
                self.of(task)
            except UserError as error:
                raise UserError(
                    f"{error} (column 'workflow' of task {task.id!r}; name the columns to keep in tasks.columns if "
                    "it is something else)"
                ) from error
        return bool(named)


def load_workflow(path: str, http: HttpConfig | None = None) -> Workflow:
    """Load the workflow at `module:name` or `file.py:name`: a function, an object with `run`, or a class of such
    objects that needs no arguments. A URL is an environment, called as `http` says. Anything else that
    contains a space or begins with `/`, `./` or `~/` is a command."""
    if is_url(path):
        return HttpEnvironment(path, http)
    if is_command(path):
        return CommandWorkflow(path)
    return as_workflow(load_object(path, what="workflow"), path)


def as_workflow(value: Any, name: str = "") -> Workflow:
    """Wrap what a user passed as a workflow, or refuse it."""
    label = name or getattr(value, "__name__", type(value).__name__)
    if inspect.isclass(value) and hasattr(value, "run"):
        value = value()
    run = getattr(value, "run", None)
    call = run if run is not None else value
    if not inspect.iscoroutinefunction(call):
        raise UserError(
            "a workflow must be `async def workflow(task, rollout)` or an object with such a `run`; "
            f"got {label!r}, which is neither"
        )
    try:
        inspect.signature(call).bind("task", "rollout")
    except TypeError as error:
        raise UserError(f"a workflow takes (task, rollout), got {label}{inspect.signature(call)}") from error
    workflow: Workflow = value if run is not None else FunctionWorkflow(value)
    return workflow
