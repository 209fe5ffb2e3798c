import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt
from pydantic import BaseModel, ValidationError

from penstock.config.loader import load_config
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


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("rollout.stop=['']", "rollout.stop.0: string should have at least 1 character"),
        ("run.steps=true", "run.steps: input should be a number, not true or false, got True"),
        ("placement.trainer=[true]", "placement.trainer: input should be a number, not true or false"),
        ("engine.beside={vllm: true}", "engine.beside: input should be a number, not true or false"),
        ("rollout.temperature=false", "rollout.temperature: input should be a number, not true or false"),
        ("rollout.group_size=1000000000", "input should be less than or equal to 65536, got 1000000000"),
        ("rollout.groups_per_step=1000000000", "input should be less than or equal to 65536"),
        ("staleness.max_staleness=1000000000000", "input should be less than or equal to 1000"),
        ("engine.count=99999", "engine.count: input should be less than or equal to 10000, got 99999"),
        ("reward.workers=1000000", "input should be less than or equal to 1024"),
        ("reward.threads=1000000", "input should be less than or equal to 1024"),
        ("engine.threads=1000000", "input should be less than or equal to 1024"),
        ("trainer.threads=1000000", "input should be less than or equal to 1024"),
        ("rollout.workers=1000000", "input should be less than or equal to 1024"),
        ("sync.slots=1000000000", "input should be less than or equal to 64"),
        ("sync.bucket_mb=1000000000000", "input should be less than or equal to 65536"),
        ("run.freeze_s=0.001", "run.freeze_s: must be 0, or at least 2: workers report every half second"),
        ("rollout.temperature=1e-300", "input should be greater than or equal to 0.000001"),
        ("eval.temperature=1.0e-300", "eval.temperature: must be 0, or at least 1e-06"),
    ],
)
def test_senseless_values_have_bounds(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(PenstockConfig, None, [word])
    assert sentence in str(refusal.value)


def test_a_step_has_at_most_a_million_episodes() -> None:
    with pytest.raises(
        ValidationError, match="a step must have at most 1,048,576 episodes .* got 67,108,864"
    ):
        config(rollout={"group_size": 65536, "groups_per_step": 1024})
    config(rollout={"group_size": 1024, "groups_per_step": 1024})


@pytest.mark.parametrize("word", ["trainer.batch_size=8", "batch_size=8", "trainer.mini_batch_size=8"])
def test_the_size_of_a_batch_is_said_where_it_is_set(word: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(PenstockConfig, None, [word])
    assert str(refusal.value).endswith(
        "; a step trains on rollout.group_size x rollout.groups_per_step answers"
    )
