"""Says what `run.deterministic` requires of the other settings, so that every step repeats bit by bit, also
after a restart.

    the first groups that selection leaves ─► each answer generated alone ─► trained in order

Synchronous training fixes which weights sample which group. Groups are numbered in the order of the tasks,
and seeds follow from the numbers. The last bits of logits depend on what else is in a batch, so each answer
is generated alone. A run that resumes from a checkpoint discards the step under way, and so samples the same
tokens again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.engines.kinds import DEFAULT_KIND, KINDS, kind_of, path_of_settings, settings_of

if TYPE_CHECKING:
    from penstock.config.root import PenstockConfig
    from penstock.engines.config import EngineConfig


IMPLIED: dict[tuple[str, ...], Any] = {
    ("staleness", "max_staleness"): 0,
    ("model", "device"): "cpu",
}
"""What `run.deterministic` sets unless the config sets it. The engine's kind adds its `repeats_with`."""


def with_implied(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a deterministic run's config, with the implied settings added."""
    filled = dict(sections)
    for path, value in IMPLIED.items():
        filled = _with_default(filled, path, value)
    engine = sections.get("engine") or {}
    kind = engine.get("kind", DEFAULT_KIND) if isinstance(engine, Mapping) else ""
    if kind in KINDS:  # the settings of another are checked when it is loaded
        for setting, value in (kind_of(kind).repeats_with or {}).items():
            filled = _with_default(filled, ("engine", kind, setting), value)
    return filled


def _with_default(section: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key, rest = path[0], path[1:]
    if not rest:
        return {key: value, **section}
    inside = section.get(key) or {}
    if not isinstance(inside, Mapping):  # built already, so all its settings are set
        return dict(section)
    return {**section, key: _with_default(inside, rest, value)}


def conflicts(config: "PenstockConfig") -> list[str]:
    """List the values that a deterministic run needs and the config does not have."""
    engine, staleness = config.engine, config.staleness
    needed = {
        f"staleness.max_staleness=0 (got {staleness.max_staleness})": staleness.max_staleness == 0,
        "staleness.adaptive=false": not staleness.adaptive,
        **_of_engine(engine),
        "one engine (engine.count=1, no engine.beside)": len(engine.members) == engine.num_most == 1,
        "answers of one turn (no rollout.workflow)": config.rollout.workflow is None,
        "a CPU (model.device=cpu)": not config.model.device.startswith("cuda"),
        "a CPU (engine.device=cpu)": not engine.device.startswith("cuda"),
    }
    return [setting for setting, is_met in needed.items() if not is_met]


def _of_engine(engine: "EngineConfig") -> dict[str, bool]:
    """Return the settings that the engine's kind needs, each with whether it has the value."""
    needed = kind_of(engine.kind).repeats_with
    if needed is None:
        return {f"engine.kind={DEFAULT_KIND} (got {engine.kind})": False}
    own, path = settings_of(engine), path_of_settings(engine)
    return {
        f"{path}.{name}={json.dumps(value)} (got {json.dumps(getattr(own, name))})": getattr(own, name)
        == value
        for name, value in needed.items()
    }
