from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from penstock.engines.vllm.router_layout import layout_of, read_layout
from penstock.errors import UserError
from penstock.models.routing import find_routers
from tests.models.moe import CONFIGS, moe_model
from tests.trainer.builders import tiny_model


@pytest.mark.parametrize("family", CONFIGS)
def test_a_layout_is_that_of_the_routers_that_choose(family: str) -> None:
    model = moe_model(family)
    routers = find_routers(model, lambda: model(input_ids=torch.zeros(1, 1, dtype=torch.long)))
    layout = layout_of(model)
    assert routers is not None and layout is not None
    assert layout.shape == routers.shape
    assert layout.num_decoder_layers == 3
    assert layout.layers == tuple(range(3))[-routers.shape.num_layers :]


def test_no_weights_are_needed(tmp_path: Path) -> None:
    model = moe_model("glm4-moe")
    model.config.save_pretrained(tmp_path)
    layout = read_layout(str(tmp_path))
    assert layout == layout_of(model)
    assert layout is not None and layout.layers == (1, 2)


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    assert layout_of(tiny_model("llama")) is None
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert read_layout(str(tmp_path)) is None


def test_a_model_whose_experts_are_not_found_is_refused_by_name() -> None:
    model = moe_model("mixtral")
    model.config.num_local_experts = 5
    with pytest.raises(
        UserError, match=r"^MixtralForCausalLM's routers can't be found: .*record_routing=off"
    ):
        layout_of(model)
