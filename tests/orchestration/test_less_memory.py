from typing import Any

import pytest

from penstock.engines.config import EngineConfig, with_settings
from penstock.engines.engine_client import EngineStart
from penstock.orchestration.less_memory import fewer_sequences


def start_with(config: dict[str, Any]) -> EngineStart:
    return EngineStart(name="engine1", model="m", device="cuda:0", threads=1, config=config)


def test_the_next_process_holds_half_as_many_sequences() -> None:
    config = {"kind": "embedded", "max_context": 64, "embedded": {"max_batch": 65, "block_size": 16}}
    turned = fewer_sequences(start_with(config))
    assert turned is not None
    start, word = turned
    before, after = (EngineConfig.model_validate(one) for one in (config, start.config))
    assert after == with_settings(before, max_batch=32)
    assert after.embedded.block_size == 16
    assert (start.name, start.device) == ("engine1", "cuda:0")
    assert word == (
        "engine1 computes 32 sequences at a time from now on, instead of 65 (engine.embedded.max_batch)"
    )


@pytest.mark.parametrize(
    "config",
    [{"kind": "embedded", "embedded": {"max_batch": 1}}, {"kind": "vllm", "embedded": {"max_batch": 64}}],
)
def test_where_there_is_nothing_to_halve_nothing_is_turned(config: dict[str, Any]) -> None:
    assert fewer_sequences(start_with(config)) is None
