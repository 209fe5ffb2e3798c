import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt
from pydantic import BaseModel, ValidationError

from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError
from penstock.run.preflight import warn_of_idle_penalty


def config(**sections):
    return PenstockConfig.model_validate(sections)


def test_reinforce_pp_needs_two_episodes_a_step():
    one = {"group_size": 1, "groups_per_step": 1}
    with pytest.raises(ValidationError, match="a step must have at least 2 episodes .*, got 1"):
        config(algorithm={"advantage": "reinforce_pp"}, rollout=one)
    config(algorithm={"advantage": "reinforce_pp"}, rollout={"group_size": 1, "groups_per_step": 2})


def test_agents_are_answered_by_the_one_policy_of_a_run():
    models = {"gpt-4o": "policy", "*": "policy"}
    assert config(rollout={"agents": {"models": models}}).rollout.agents.models == models
    with pytest.raises(ValidationError) as raised:
        config(rollout={"agents": {"models": {**models, "judge": "teacher"}}})
    assert (
        "rollout.agents.models must name the policy that the run's engines serve, 'policy', got 'teacher' for "
        "'judge'; let agents ask for other models where those are served"
    ) in str(raised.value)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("rollout", "temperature"),
        ("engine", "memory_share"),
        ("eval", "temperature"),
        ("staleness", "ess_floor"),
        ("trainer", "learning_rate"),
        ("reward", "timeout_s"),
        ("observe", "watchdog_s"),
    ],
)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_no_section_takes_an_infinity_or_nan(section, field, value):
    given = {"embedded": {field: value}} if section == "engine" else {field: value}
    with pytest.raises(ValidationError):
        config(**{section: given})


CHECKED_ELSEWHERE = {
    f"algorithm.{name}"
    for name in ("advantage_args", "loss_args", "corrections", "engine_corrections", "selection")
} | {"reward.functions.weight", "eval.tasks.arguments", "tasks.arguments"}
"""By `algorithms.registry`; a weight may be negative; arguments of a source are its own."""


def numbers(annotation: Any, bounds: tuple[Any, ...]) -> Iterator[bool]:
    """For every number that a field may hold, however deep: whether a bound stands beside it."""
    if annotation in (int, float):
        yield any(isinstance(bound, Ge | Gt) for bound in bounds)
    for inner in get_args(annotation):
        metadata = getattr(annotation, "__metadata__", ())
        yield from numbers(inner, (*bounds, *(b for one in metadata for b in getattr(one, "metadata", ()))))


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        for inner in sections_in(field.annotation):
            yield from fields(inner, f"{path}{name}.")


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def test_every_number_has_a_range() -> None:
    found = {
        name: list(numbers(field.annotation, tuple(field.metadata))) for name, field in fields(PenstockConfig)
    }
    assert sum(len(held) for held in found.values()) > 100
    without = {name for name, held in found.items() if not all(held)}
    assert without - CHECKED_ELSEWHERE == set()


def test_an_overlong_penalty_that_never_acts_is_said():
    said = []
    warn_of_idle_penalty(config(algorithm={"selection": {"overlong_penalty": {}}}), said.append)
    assert said == [
        "algorithm.selection.overlong_penalty begins at 16384 tokens (max_length - margin), and answers have at "
        "most rollout.max_new_tokens=256: it never acts; lower max_length"
    ]
    near = {"overlong_penalty": {"max_length": 256, "margin": 64}}
    warn_of_idle_penalty(config(algorithm={"selection": near}), said.append)
    warn_of_idle_penalty(config(), said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("sent", "held", "is_good"),
    [
        ("engine", "bfloat16", True),
        ("bfloat16", "float32", True),
        ("bfloat16", "bfloat16", True),
        ("float32", "auto", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
    ],
)
def test_engines_must_hold_what_is_sent(sent: str, held: str, is_good: bool) -> None:
    overrides = {"sync": {"dtype": sent}, "engine": {"dtype": held}}
    if is_good:
        PenstockConfig.model_validate(overrides)
    else:
        with pytest.raises(ConfigError, match=rf"what engines of {held} hold without loss, got {sent}"):
            PenstockConfig.model_validate(overrides)


def test_weights_are_published_often_enough_for_the_bound():
    assert config(sync={"every": 5}).sync.every == 5
    with pytest.raises(ValidationError, match="sync.every must be at most 5, got 6: engines would sample"):
        config(sync={"every": 6})
    with pytest.raises(ValidationError, match="sync.every must be at most 2, got 3"):
        config(sync={"every": 3}, staleness={"adaptive": True})
