from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from penstock.config.root import PenstockConfig
from penstock.errors import UserError
from penstock.placement.placed_config import resolve_adapter
from tests.models.test_lora_targets import SIZES


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    return str(tmp_path)


def resolve(
    model: str,
    lora: dict[str, Any] | None,
    trainer: dict[str, Any] | None = None,
    log: Any = lambda line: None,
    **embedded: Any,
) -> Any:
    config = {"model": {"lora": lora}, "engine": {"embedded": embedded}, "trainer": trainer or {}}
    return resolve_adapter(PenstockConfig.model_validate(config), model, saved=False, log=log)


def test_it_says_what_is_trained_and_how_fast(model: str) -> None:
    lines: list[str] = []
    resolve(model, {"rank": 3, "targets": ["q_proj"]}, log=lines.append)
    assert lines[0] == (
        "a LoRA adapter of rank 3 on 2 layers: 384 parameters are trained, and the model's 19,424 stay"
    )
    assert "trainer.learning_rate is 1e-05" in lines[1]
    chosen: list[str] = []
    resolve(model, {"rank": 3, "dora": True}, {"learning_rate": 1e-5}, log=chosen.append)
    assert len(chosen) == 1
    assert chosen[0].startswith("a DoRA adapter of rank 3 on 14 layers")


def test_without_an_adapter_nothing_changes(model: str) -> None:
    config, adapter = resolve(model, None)
    assert adapter is None
    assert config == PenstockConfig()


def test_engines_get_room_for_it(model: str) -> None:
    config, adapter = resolve(model, {"rank": 3, "targets": ["q_proj"]})
    assert adapter.num_parameters == 2 * 3 * (32 + 32)
    embedded = config.engine.embedded
    assert (embedded.max_adapters, embedded.adapters) == (1, "auto")
    assert embedded.max_adapter_rank >= 3
    assert resolve(model, {"rank": 300})[0].engine.embedded.max_adapter_rank == 300
    assert resolve(model, {"rank": 3}, adapters="merged")[0].engine.embedded.adapters == "merged"


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"dora": True}, "must be auto or merged with model.lora.dora=true"),
        ({"targets": ["lm_head"]}, "must be auto or merged with an adapter on the output embedding"),
    ],
)
def test_what_has_no_other_way_is_merged(model: str, lora: dict[str, Any], words: str) -> None:
    config, _ = resolve(model, lora)
    assert config.engine.embedded.adapters == "merged"
    with pytest.raises(UserError, match=words):
        resolve(model, lora, adapters="unmerged")
