from typing import Any

import pytest

from penstock.config.loader import build
from penstock.errors import ConfigError
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.repeatable import conflicts

REPEATABLE: dict[str, Any] = {
    "run": {"deterministic": True},
    "staleness": {"max_staleness": 0},
    "engine": {"embedded": {"prefix_cache": False}},
}


def test_a_config_that_repeats_has_no_conflict() -> None:
    assert conflicts(build(PenstockConfig, REPEATABLE)) == []


def test_all_conflicts_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        build(PenstockConfig, {"run": {"deterministic": True}})
    assert (
        "run.deterministic=true needs staleness.max_staleness=0 (got 4), engine.embedded.prefix_cache=false"
        in str(refused.value)
    )


@pytest.mark.parametrize(
    ("section", "change", "needed"),
    [
        ("engine", {"count": 2}, "one engine"),
        ("engine", {"kind": "vllm"}, "engine.kind=embedded (got vllm)"),
        ("rollout", {"workflow": "some.py:flow"}, "answers of one turn"),
        ("model", {"device": "cuda"}, "a CPU (model.device=cpu)"),
        ("engine", {"device": "cuda:1"}, "a CPU (engine.device=cpu)"),
        ("staleness", {"adaptive": True}, "staleness.adaptive=false"),
    ],
)
def test_what_does_not_repeat_is_refused(section: str, change: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(PenstockConfig, {**REPEATABLE, section: {**REPEATABLE.get(section, {}), **change}})
    assert needed in str(refused.value)
