from typing import Any

import pytest

from penstock.config.loader import build
from penstock.config.repeatable import conflicts
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError

REPEATABLE: dict[str, Any] = {"run": {"deterministic": True}}
OTHERWISE: dict[str, Any] = {
    "staleness": {"max_staleness": 4},
    "engine": {"embedded": {"prefix_cache": True}},
}


def test_what_a_run_that_repeats_needs_is_set() -> None:
    config = build(PenstockConfig, {**REPEATABLE, "engine": {"embedded": {"block_size": 8}}})
    assert conflicts(config) == []
    assert (config.staleness.max_staleness, config.model.device) == (0, "cpu")
    embedded = config.engine.embedded
    assert (embedded.prefix_cache, embedded.max_batch, embedded.block_size) == (False, 1, 8)
    assert build(PenstockConfig, {}).engine.embedded.prefix_cache


def test_all_conflicts_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        build(PenstockConfig, {**REPEATABLE, **OTHERWISE})
    assert (
        "run.deterministic=true needs staleness.max_staleness=0 (got 4), engine.embedded.prefix_cache=false"
        in str(refused.value)
    )


@pytest.mark.parametrize(
    ("section", "change", "needed"),
    [
        ("engine", {"count": 2}, "one engine"),
        ("rollout", {"workflow": "some.py:flow"}, "answers of one turn"),
        ("model", {"device": "cuda"}, "a CPU (model.device=cpu)"),
        ("engine", {"kind": "vllm"}, "engine.kind=embedded (got vllm)"),
        ("engine", {"embedded": {"max_batch": 8}}, "engine.embedded.max_batch=1 (got 8)"),
        ("engine", {"device": "cuda:1"}, "a CPU (engine.device=cpu)"),
        ("staleness", {"adaptive": True}, "staleness.adaptive=false"),
    ],
)
def test_what_does_not_repeat_is_refused(section: str, change: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(PenstockConfig, {**REPEATABLE, section: {**REPEATABLE.get(section, {}), **change}})
    assert needed in str(refused.value)
