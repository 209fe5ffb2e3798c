import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.errors import MissingExtraError, UserError
from penstock.models.adapter_check import check_adapter
from penstock.models.config import LoraConfig, ModelConfig
from penstock.trainer.adapter import TrainedAdapter
from tests.models.test_lora_targets import SIZES


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """Of rank 3, on queries and values."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    lora = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj"))
    TrainedAdapter(model, lora, base="the/base").save(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def test_a_new_adapter_is_counted(model: str) -> None:
    lora = LoraConfig(rank=3, targets=("q_proj",))
    checked = check_adapter(ModelConfig(lora=lora), model)
    assert checked.lora == lora
    assert checked.num_parameters == 2 * 3 * (32 + 32)
    assert not checked.is_on_head
    on_head = check_adapter(ModelConfig(lora=LoraConfig(rank=3, targets=("lm_head",))), model)
    assert (on_head.num_parameters, on_head.is_on_head) == (3 * (32 + 61), True)


def test_a_saved_adapter_brings_its_settings(model: str, adapter: str) -> None:
    checked = check_adapter(ModelConfig(adapter=adapter), model)
    assert (checked.lora.rank, checked.lora.alpha) == (3, 6.0)
    assert checked.lora.targets == ("q_proj", "v_proj")
    assert checked.num_parameters == 2 * 3 * (32 + 32 + 32 + 16)
    same = check_adapter(ModelConfig(adapter=adapter, lora=checked.lora), model)
    assert same == checked


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, "model.lora.rank must be 3, as in the adapter .*, got 8"),
        ({"dora": True}, "model.lora.dora must be False"),
        (
            {"targets": ["q_proj"]},
            r"model.lora.targets must be the layers of the adapter .* \(q_proj, v_proj\)",
        ),
    ],
)
def test_settings_that_contradict_it_are_refused(
    model: str, adapter: str, lora: dict[str, object], words: str
) -> None:
    section = ModelConfig.model_validate({"adapter": adapter, "lora": lora})
    with pytest.raises(UserError, match=words):
        check_adapter(section, model)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, adapter: str) -> None:
    LlamaConfig(**{**SIZES, "hidden_size": 64}).save_pretrained(tmp_path / "wider")
    with pytest.raises(
        UserError, match=r"does not fit .* \(it was trained on the/base\): .* must be 3×64, got 3×32"
    ):
        check_adapter(ModelConfig(adapter=adapter), str(tmp_path / "wider"))
    LlamaConfig(**{**SIZES, "num_hidden_layers": 3}).save_pretrained(tmp_path / "deeper")
    with pytest.raises(UserError, match="layers.2.* got absent"):
        check_adapter(ModelConfig(adapter=adapter), str(tmp_path / "deeper"))


def test_a_run_that_goes_on_needs_no_adapter_but_its_own(model: str) -> None:
    gone = ModelConfig(adapter="/gone", lora=LoraConfig(rank=3, targets=("q_proj",)))
    assert check_adapter(gone, model, saved=True).lora.rank == 3
    with pytest.raises(UserError, match="/gone is not an adapter"):
        check_adapter(gone, model)


def test_without_peft_the_extra_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[lora\]'"):
        check_adapter(ModelConfig(lora=LoraConfig()), model)
