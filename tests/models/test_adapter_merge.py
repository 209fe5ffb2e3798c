from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.errors import UserError
from penstock.models.adapter_merge import merge_adapter, merged_weight
from penstock.models.config import LoraConfig
from penstock.records import AdapterSpec
from tests.trainer.builders import SIZES, tiny_model
from tests.trainer.test_adapter import adapted, logits_of


def test_a_weight_by_hand() -> None:
    weight = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0], [3.0]])
    spec = AdapterSpec(rank=1, alpha=2.0)
    assert merged_weight(weight, a, b, spec).tolist() == [[3.0, 0.0], [6.0, 13.0]]
    lengths = torch.tensor([6.0, 205.0**0.5])
    scaled = merged_weight(weight, a, b, spec, lengths)
    torch.testing.assert_close(scaled, torch.tensor([[6.0, 0.0], [6.0, 13.0]]))


@pytest.mark.parametrize(
    "options", [{}, {"dora": True}, {"rslora": True}, {"dora": True, "targets": ("q_proj", "down_proj")}]
)
def test_the_merged_model_is_the_adapted_one(tmp_path: Path, options: dict[str, object]) -> None:
    model, adapter = adapted(lora=LoraConfig.model_validate({"rank": 3, "alpha": 6.0, **options}))
    adapter.save(tmp_path)
    merged = tiny_model("qwen3")
    merge_adapter(merged, tmp_path)
    assert (logits_of(merged) - logits_of(model)).abs().max() < 1e-4
    by_peft = PeftModel.from_pretrained(tiny_model("qwen3"), str(tmp_path)).eval()
    assert (logits_of(merged) - logits_of(by_peft)).abs().max() < 1e-4
    assert merged.state_dict().keys() == tiny_model("qwen3").state_dict().keys()


def test_weights_keep_their_format(tmp_path: Path) -> None:
    _, adapter = adapted()
    adapter.save(tmp_path)
    half = tiny_model("qwen3").to(torch.bfloat16)
    merge_adapter(half, tmp_path)
    whole = tiny_model("qwen3").to(torch.bfloat16).float()
    merge_adapter(whole, tmp_path)
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, whole.state_dict()[name].to(torch.bfloat16))


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    _, adapter = adapted("llama")
    adapter.save(tmp_path)
    other = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **change}))
    with pytest.raises(UserError, match="does not fit this LlamaForCausalLM: they differ in model.layers"):
        merge_adapter(other, tmp_path)
