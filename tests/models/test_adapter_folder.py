import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import UserError
from penstock.models.adapter_folder import (
    CONFIG,
    TENSORS,
    is_adapter,
    model_below,
    read_adapter,
    tensor_shapes,
)
from penstock.models.config import LoraConfig

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "bias": "none"}
LAYER = "model.layers.0.self_attn.q_proj"


def make(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **config}))
    tensors = {f"base_model.model.{LAYER}.lora_A.weight": torch.zeros(4, 6)}
    tensors[f"base_model.model.{LAYER}.lora_B.weight"] = torch.zeros(3, 4, dtype=torch.bfloat16)
    save_file(tensors, folder / TENSORS)
    return folder


def test_settings_and_base_are_read(tmp_path: Path) -> None:
    folder = make(tmp_path, use_rslora=True, base_model_name_or_path="some/model", lora_dropout=0.1)
    found = read_adapter(folder)
    assert found.base == "some/model"
    assert found.lora == LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), dropout=0.1, rslora=True)


def test_shapes_are_by_the_names_under_which_tensors_are_sent(tmp_path: Path) -> None:
    assert tensor_shapes(make(tmp_path)) == {
        f"{LAYER}.lora_A.weight": (4, 6),
        f"{LAYER}.lora_B.weight": (3, 4),
    }


@pytest.mark.parametrize(
    "config", [{"target_modules": ".*q_proj"}, {"target_modules": ["q_proj"], "layers_to_transform": [0]}]
)
def test_of_a_pattern_the_saved_layers_are_the_targets(tmp_path: Path, config: dict[str, Any]) -> None:
    assert read_adapter(make(tmp_path, **config)).lora.targets == (LAYER,)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "must be a LoRA adapter, got 'IA3'"),
        ({"rank_pattern": {"q_proj": 8}}, "only plain LoRA matrices"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=\\['lm_head'\\]"),
        ({"bias": "all"}, "bias='all'"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights='pissa', .*path_initial_model_for_weight_conversion",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, "must leave the weights below it as they are"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
        ({"r": 0}, "can't be read"),
    ],
)
def test_more_than_plain_matrices_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_adapter(make(tmp_path, **config))


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_what_matrices_started_from_does_not_matter(tmp_path: Path, init: bool | str | None) -> None:
    assert read_adapter(make(tmp_path, init_lora_weights=init)).lora.rank == 4


def test_the_model_below_an_adapter_is_the_one_that_it_names(tmp_path: Path) -> None:
    assert model_below("some/model") == ("some/model", None)
    assert model_below(str(tmp_path)) == (str(tmp_path), None)
    make(tmp_path, base_model_name_or_path="the/base")
    assert model_below(str(tmp_path)) == ("the/base", tmp_path)
    make(tmp_path)
    with pytest.raises(UserError, match="does not name the model below it"):
        model_below(str(tmp_path))


def test_what_is_no_adapter_is_said_to_be_none(tmp_path: Path) -> None:
    assert not is_adapter(tmp_path)
    with pytest.raises(UserError, match="is not an adapter"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    (tmp_path / TENSORS).write_bytes(b"nothing")
    assert is_adapter(tmp_path)
    with pytest.raises(UserError, match=r"adapter_config.json can't be read"):
        read_adapter(tmp_path)
    with pytest.raises(UserError, match=r"adapter_model.safetensors can't be read"):
        tensor_shapes(tmp_path)
