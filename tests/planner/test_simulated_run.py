"""Whole runs in virtual time: what comes out follows from the speeds, and the controller's cost from nothing else."""

from typing import Any

import pytest

from penstock.planner.config import SimulatedConfig
from penstock.planner.simulated_run import Outcome, PromptTokenizer, simulate
from penstock.planner.simulation import SimulatedTokenizer

QUICK = {"step_s": 0.1, "sync_s": 0.01, "straggler_share": 0.0, "answer_spread": 0.1, "score_s": 0.01}
"""Nothing takes long."""


def outcome_of(
    engines: int,
    *,
    steps: int = 6,
    late: str = "wait",
    max_staleness: int = 2,
    sync: dict[str, Any] | None = None,
    **simulation: Any,
) -> Outcome:
    config = SimulatedConfig.model_validate(
        {
            "engine": {"count": engines},
            "run": {"steps": steps},
            "rollout": {"group_size": 4, "groups_per_step": 2 * engines, "max_new_tokens": 500},
            "staleness": {"max_staleness": max_staleness, "late": late},
            "sync": sync or {},
            "simulation": {"answer_tokens": 50, "straggler_share": 0.05, **simulation},
        }
    )
    return simulate(config)


def test_a_slow_trainer_is_busy_and_a_quick_one_waits() -> None:
    slow, quick = outcome_of(4, step_s=60.0), outcome_of(4, step_s=0.01)
    assert slow.trainer_busy > 0.7 > 0.1 > quick.trainer_busy
    assert quick.engine_busy > slow.engine_busy
    assert (slow.groups, slow.dropped) == (48, {})


def test_the_bound_holds_with_stragglers_of_25_times() -> None:
    outcome = outcome_of(8, step_s=2.0, straggler_share=0.1, straggler_factor=25.0)
    assert 0 < outcome.staleness_mean <= outcome.staleness_max <= 2


def test_nodes_that_die_cost_time_and_no_group() -> None:
    calm = outcome_of(8, step_s=2.0, engines_per_node=2)
    dying = outcome_of(8, step_s=2.0, engines_per_node=2, node_life_h=0.05, replace_s=20.0)
    assert (calm.node_deaths, calm.dropped, dying.dropped) == (0, {}, {})
    assert dying.node_deaths > 0
    assert dying.steps == calm.steps


SYNC_S = 30.0


@pytest.mark.parametrize(
    ("sync", "per_node", "transport", "sync_s"),
    [
        ({}, 8, "shared_memory", 4 * SYNC_S),
        ({"load_share": 0.5}, 8, "shared_memory", 2 * SYNC_S),
        ({"selection": "delta"}, 8, "shared_memory", SYNC_S),
        ({}, 4, "http", SYNC_S),
        ({"folder": "/shared"}, 4, "filesystem", SYNC_S),
        ({"transport": "collective"}, 8, "collective", SYNC_S),
    ],
)
def test_weights_travel_as_with_the_transport_of_the_config(
    sync: dict[str, Any], per_node: int, transport: str, sync_s: float
) -> None:
    """A synchronous run waits for each update. Its answers end within 2 s."""
    speeds = {**QUICK, "engines_per_node": per_node, "sync_s": SYNC_S}
    outcome = outcome_of(8, max_staleness=0, sync=sync, **speeds)
    assert outcome.transport == transport
    per_step_s = outcome.hours * 3600 / outcome.steps
    assert sync_s < per_step_s < sync_s + 5
    assert outcome.limits["weight sync"] > 0.8


@pytest.mark.parametrize(
    ("limit", "simulation"),
    [
        ("trainer", {"step_s": 60.0}),
        ("engines", {"token_s": 0.5, "answer_spread": 0.0}),
        ("admission", {"straggler_share": 0.02, "straggler_factor": 100.0}),
        ("weight sync", {"sync_s": 60.0}),
        ("scoring", {"score_s": 60.0}),
    ],
)
def test_the_stage_that_limits_the_run_is_named_first(limit: str, simulation: dict[str, float]) -> None:
    outcome = outcome_of(8, **{**QUICK, **simulation})
    assert next(iter(outcome.limits)) == limit
    assert outcome.limits[limit] > 0.5
    assert sum(outcome.limits.values()) == pytest.approx(1.0, abs=0.1)


def test_the_slowest_of_many_ranks_decides() -> None:
    one = outcome_of(4, step_s=20.0, step_spread=0.3)
    many = outcome_of(4, step_s=20.0, step_spread=0.3, ranks=16)
    assert many.ranks == 16
    assert many.hours > one.hours


def test_the_controllers_cost_per_group_does_not_grow_with_engines() -> None:
    """`python -m benchmarks ray` measures it up to 1,000."""
    few = outcome_of(8, steps=32)
    many = outcome_of(128, steps=2)
    assert few.groups == many.groups
    assert many.controller_us_per_group < 2 * few.controller_us_per_group


@pytest.mark.parametrize("tokenizer", [PromptTokenizer(), SimulatedTokenizer()])
def test_prompts_are_tokens(tokenizer: SimulatedTokenizer) -> None:
    assert all(0 < token < 2**31 for token in tokenizer.encode_prompt("p7"))
    assert PromptTokenizer().encode_prompt("p7") != PromptTokenizer().encode_prompt("p8")
