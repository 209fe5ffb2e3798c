"""Turns the arguments of `penstock.train` into a config, rows of tasks and reward functions."""

import difflib
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from penstock.config.loader import build, read_yaml
from penstock.config.root import PenstockConfig
from penstock.config.section import nearest_key, section_of
from penstock.errors import ConfigError, UserError
from penstock.records import Task
from penstock.scoring.config import RewardConfig, RewardFunction
from penstock.scoring.functions import Reward, load_callable, wrap
from penstock.tasks.task_rows import Row
from penstock.usercode import describe_callable

OneReward = str | Callable[..., Any] | tuple[str | Callable[..., Any], float]
Rewards = OneReward | Iterable[OneReward] | Mapping[str, Any]
"""A function or its path; `(function, weight)`; a list of these; or a mapping from names to these,
`{"style": (function, 0.5)}`. A mapping with keys of the section `reward` is that section."""

FORMS = "a function, its path, (function, weight), a list of these, or a mapping from names to them"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReward:
    """Holds one reward function; `path` is None if no other process can load it."""

    function: str | Callable[..., Any]
    path: str | None
    weight: float = 1.0
    name: str | None = None

    def entry(self) -> dict[str, Any]:
        """Return its entry in `reward.functions`."""
        return {"path": self.path, "weight": self.weight, "name": self.name}

    def in_this_process(self, device: str) -> Reward:
        call = load_callable(self.function) if isinstance(self.function, str) else self.function
        own = self.function.rpartition(":")[2] if isinstance(self.function, str) else ""
        return wrap(call, name=self.name or own, weight=self.weight, device=device)


def read_rewards(given: Rewards) -> tuple[tuple[GivenReward, ...], dict[str, Any]]:
    """Return the reward functions, and the other settings of a `reward` that is a section. Without functions,
    those of the config are used."""
    if isinstance(given, Mapping):
        if given and given.keys() <= RewardConfig.model_fields.keys():
            settings = dict(given)
            functions = settings.pop("functions", None)
            return (() if functions is None else read_rewards(functions)[0]), settings
        if "path" not in given:
            return _some([_one(function, name) for name, function in given.items()]), {}
    elif isinstance(given, Iterable) and not isinstance(given, str) and not _is_weighted(given):
        return _some([_one(function) for function in given]), {}
    return (_one(given),), {}


def _some(rewards: list[GivenReward]) -> tuple[GivenReward, ...]:
    if not rewards:
        raise UserError(f"reward must be {FORMS}, got none")
    return tuple(rewards)


def _one(given: Any, name: str | None = None) -> GivenReward:
    if isinstance(given, Mapping | RewardFunction):
        try:
            entry = RewardFunction.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"reward: {error.errors()[0]['msg']} in {given!r}") from error
        return GivenReward(function=entry.path, path=entry.path, weight=entry.weight, name=name or entry.name)
    function, weight = given if _is_weighted(given) else (given, 1.0)
    if not math.isfinite(weight):
        raise UserError(f"the weight of a reward must be a finite number, got {weight}")
    if isinstance(function, str):
        return GivenReward(function=function, path=function, weight=weight, name=name)
    if not callable(function):
        raise UserError(f"reward must be {FORMS}, got {given!r}")
    return GivenReward(function=function, path=describe_callable(function), weight=weight, name=name)


def _is_weighted(given: Any) -> bool:
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[1], int | float)
        and not isinstance(given[1], bool)
    )


Config = str | Path | Mapping[str, Any] | PenstockConfig
Tasks = str | Mapping[str, Any] | Iterable[Row]
"""A source, rows, or the section with its settings: `{"rows": rows, "as_chat": True}`."""

DEMO = Path(__file__).parents[1] / "demo" / "demo.yaml"
ROWS, HELDOUT_ROWS = "rows", "heldout_rows"
"""The `source` in the config of rows that were given in Python."""
NAMED = ("model", "tasks", "eval_tasks", "reward", "steps")
"""Arguments that are not sections."""
OF_EVERY_ROW = ("prompt", "columns", "as_chat", "system")
"""Settings of `tasks` that also hold for held-out rows, unless these have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Holds a config, and what no config can hold."""

    config: PenstockConfig
    tasks: Iterable[Row] | None
    heldout: Iterable[Row] | None
    local_rewards: tuple[GivenReward, ...]
    """All reward functions, if a worker process can't load one of them by path."""


def read_arguments(
    config: Config | None,
    *,
    model: str | Mapping[str, Any] | None = None,
    tasks: Tasks | None = None,
    eval_tasks: Tasks | None = None,
    reward: Rewards | None = None,
    steps: int | None = None,
    sections: Mapping[str, Mapping[str, Any]],
) -> Arguments:
    """Merge all arguments into one config. They override `config`, and `eval_tasks` and `steps` override
    sections."""
    _check_names(sections)
    data = _sections(_start(config, model, tasks, reward))
    own: dict[str, Any] = {**sections}
    if model is not None:
        own["model"] = {"name": model} if isinstance(model, str) else model
    rewards: tuple[GivenReward, ...] = ()
    if reward is not None:
        rewards, settings = read_rewards(reward)
        own["reward"] = settings
    if tasks is not None:
        own["tasks"] = tasks
    if eval_tasks is not None:
        own["eval"] = {**own.get("eval", {}), "tasks": eval_tasks}
    if steps is not None:
        own["run"] = {**own.get("run", {}), "steps": steps}
    merged = _merged(PenstockConfig, data, _sections(own))
    if "algorithm" in merged:
        merged["algorithm"] = _by_path(merged["algorithm"], "algorithm")
    train_rows, heldout_rows = _take_rows(merged)
    is_local = any(one.path is None for one in rewards)
    if rewards and not is_local:
        merged["reward"]["functions"] = [one.entry() for one in rewards]
    return Arguments(
        config=build(PenstockConfig, merged),
        tasks=train_rows,
        heldout=heldout_rows,
        local_rewards=rewards if is_local else (),
    )


def _check_names(sections: Mapping[str, Any]) -> None:
    """Refuse unknown arguments. Sections are keyword arguments, so every misspelt argument arrives as one."""
    known = PenstockConfig.model_fields
    for name in sections:
        if name in known:
            continue
        near = difflib.get_close_matches(name, [*NAMED, "workflow", *known], n=1, cutoff=0.7)
        if near:
            hint = f"did you mean {near[0]}?"
        elif (key := nearest_key(name, PenstockConfig)) is not None and "." in key:
            section, _, inner = key.partition(".")
            hint = f"did you mean {section}={{{inner!r}: …}}?"
        else:
            hint = f"it has {', '.join([*NAMED, 'workflow'])} and sections of the config: {', '.join(known)}"
        raise UserError(f"train has no argument {name!r}; {hint}")


def _start(config: Config | None, model: object, tasks: object, reward: object) -> Mapping[str, Any]:
    """Return the config that the other arguments override."""
    if isinstance(config, PenstockConfig):
        return config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, Mapping):
        return config
    if config is not None:
        return read_yaml(Path(config))
    if isinstance(model, Mapping) and "name" not in model:
        model = None  # settings such as an adapter or a device also apply to the demo's model
    return {} if any(given is not None for given in (model, tasks, reward)) else read_yaml(DEMO)


def _sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every section as a dict, ready to be merged. `tasks` and `eval.tasks` may also be given as a source
    or as rows."""
    data: dict[str, Any] = {}
    for name, section in given.items():
        if name == "tasks" and section is not None:
            section = _tasks_section(section, "tasks", ROWS)
        if section is not None and not isinstance(section, Mapping):
            more = "; held-out tasks are eval_tasks=…" if name == "eval" else ""
            raise UserError(
                f"{name} must be a section such as {name}={{'key': value}}, got {reprlib.repr(section)}{more}"
            )
        data[name] = dict(section or {})
    heldout = data.get("eval", {}).get("tasks")
    if heldout is not None:
        data["eval"]["tasks"] = _tasks_section(heldout, "eval.tasks", HELDOUT_ROWS)
    return data


def _tasks_section(given: Any, name: str, source: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"source": given, ROWS: None}
    if isinstance(given, Mapping):
        section = dict(given)
        if section.get(ROWS) is not None:
            section["source"] = source
        elif "source" in section:
            section[ROWS] = None
        return section
    if isinstance(given, Task) or not isinstance(given, Iterable):
        raise UserError(f"{name} must be a source, a list of rows or a section, got {given!r}")
    return {"source": source, ROWS: given}


def _merged(model: type[BaseModel], below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections key by key, at any depth; every other value replaces the one below it."""
    merged = dict(below)
    for key, value in above.items():
        field = model.model_fields.get(key)
        section = None if field is None else section_of(field.annotation)
        if section is not None and isinstance(value, Mapping):
            value = _merged(section, merged.get(key) or {}, value)
        merged[key] = value
    return merged


def _by_path(given: Any, where: str) -> Any:
    """Replace functions in the section (a loss, a correction) by the paths from which worker processes load
    them."""
    if isinstance(given, Mapping):
        return {_by_path(key, where): _by_path(value, f"{where}.{key}") for key, value in given.items()}
    if not callable(given):
        return given
    path = describe_callable(given)
    if path is None:
        raise UserError(
            f"{where}: {given!r} can't be imported by a worker process, which trains with it; define it at the top "
            "level of a file or a module (not in a notebook cell, and not as a lambda)"
        )
    return path


def _take_rows(data: dict[str, Any]) -> tuple[Iterable[Row] | None, Iterable[Row] | None]:
    """Take the training rows and the held-out rows out of the sections, which are then as in a config file."""
    tasks: dict[str, Any] = dict(data.get("tasks", {}))
    rows = tasks.pop(ROWS, None)
    if "tasks" in data:
        data["tasks"] = tasks
    if data.get("eval", {}).get("tasks") is None:
        return rows, None
    heldout: dict[str, Any] = dict(data["eval"]["tasks"])
    heldout_rows = heldout.pop(ROWS, None)
    if heldout_rows is not None:
        heldout = {key: tasks[key] for key in OF_EVERY_ROW if key in tasks} | heldout
    data["eval"] = {**data["eval"], "tasks": heldout}
    return rows, heldout_rows
