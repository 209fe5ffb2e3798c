from typing import Any

import pytest

from penstock.engines.embedded.engine import CAPABILITIES
from penstock.errors import UserError
from penstock.orchestration.capabilities import check_capabilities, needed_capabilities
from penstock.orchestration.config import PenstockConfig
from penstock.types import EngineReport


def config(**sections: Any) -> PenstockConfig:
    return PenstockConfig.model_validate(sections)


def report(*capabilities: str) -> EngineReport:
    return EngineReport(
        name="engine0", versions={}, capabilities=capabilities, num_running=0, num_waiting=0, max_context=8
    )


def test_what_a_plain_run_needs() -> None:
    assert set(needed_capabilities(config())) == {"logprobs", "versions", "seed", "interrupt:inflight"}


def test_an_evaluation_needs_what_its_answers_are_drawn_with_and_nothing_of_training() -> None:
    trained = config(
        rollout={"top_p": 0.9, "stop": ["."]},
        eval={"temperature": 0, "tasks": {}},
        model={"lora": {}},
        sync={"interrupt": "inflight_recompute"},
        engine={"record_routing": "on"},
    )
    needed = needed_capabilities(trained, trains=False)
    assert needed == {
        "seed": "run.seed=0",
        "truncation": "rollout.top_p=0.9",
        "stop_strings": "rollout.stop=['.']",
        "greedy": "eval.temperature=0",
    }
    check_capabilities(trained, [report(*needed)], trains=False)
    with pytest.raises(UserError, match=r"^engine engine0 lacks greedy \(for eval.temperature=0\); "):
        check_capabilities(trained, [report("seed", "truncation", "stop_strings")], trains=False)


@pytest.mark.parametrize(
    ("sections", "capability", "why"),
    [
        ({"rollout": {"top_p": 0.9}}, "sampling_mask", "rollout.top_p=0.9"),
        ({"rollout": {"top_k": 4}}, "sampling_mask", "rollout.top_k=4"),
        ({"model": {"lora": {}}}, "adapters", "model.lora"),
        ({"engine": {"record_routing": "on"}}, "routing", "engine.record_routing=on"),
        ({"rollout": {"stop": ["\n"]}}, "stop_strings", "rollout.stop=['\\n']"),
        ({"eval": {"temperature": 0, "tasks": {}}}, "greedy", "eval.temperature=0"),
        (
            {"sync": {"interrupt": "inflight_recompute"}},
            "interrupt:inflight_recompute",
            "sync.interrupt=inflight_recompute",
        ),
    ],
)
def test_what_an_engine_lacks_is_refused_with_the_setting(
    sections: dict[str, Any], capability: str, why: str
) -> None:
    needed = needed_capabilities(config(**sections))
    assert needed[capability] == why
    without = report(*(name for name in needed if name != capability))
    check_capabilities(config(**sections), [report(*needed)])
    with pytest.raises(UserError) as caught:
        check_capabilities(config(**sections), [report(*needed), without])
    assert str(caught.value) == (
        f"engine engine0 lacks {capability} (for {why}); change the setting, or choose another engine.kind"
    )


def test_the_embedded_engine_has_all_that_a_config_can_ask_for() -> None:
    everything = config(
        rollout={"top_p": 0.9, "stop": ["."]},
        eval={"temperature": 0, "tasks": {}},
        sync={"interrupt": "inflight_recompute"},
    )
    check_capabilities(everything, [report(*CAPABILITIES, "stop_strings")])
