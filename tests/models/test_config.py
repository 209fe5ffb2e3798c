import pytest
from pydantic import ValidationError

from penstock.models.config import LoraConfig, ModelConfig
from penstock.records import AdapterSpec


def test_an_adapter_is_trained_when_one_is_named() -> None:
    assert not ModelConfig().trains_adapter
    assert ModelConfig(lora=LoraConfig()).trains_adapter
    assert ModelConfig(adapter="folder").trains_adapter


def test_engines_are_told_how_its_matrices_act() -> None:
    lora = LoraConfig(rank=8, alpha=4, rslora=True)
    assert lora.spec == AdapterSpec(rank=8, alpha=4.0, rslora=True, dora=False)


def test_targets_are_a_list_or_all_linear() -> None:
    assert LoraConfig().targets == "all-linear"
    assert LoraConfig.model_validate({"targets": ["q_proj"]}).targets == ("q_proj",)
    for wrong in ("q_proj", [], [""], [3]):
        with pytest.raises(ValidationError, match="targets"):
            LoraConfig.model_validate({"targets": wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"rank": -4},
        {"alpha": 0},
        {"alpha": float("inf")},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dora": True, "dropout": 0.1},
    ],
)
def test_numbers_have_ranges(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig.model_validate(wrong)
