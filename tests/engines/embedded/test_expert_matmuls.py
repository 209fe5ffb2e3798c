import pytest
import torch

from penstock.engines.embedded import expert_matmuls
from penstock.engines.embedded.expert_matmuls import set_expert_matmuls
from tests.engines.embedded.tiny import make_model
from tests.models.moe import CONFIGS, moe_model


@pytest.mark.parametrize("family", CONFIGS)
def test_what_needs_the_host_is_never_chosen(family: str) -> None:
    model = moe_model(family).bfloat16()
    model.set_experts_implementation("eager")
    set_expert_matmuls(model, most_tokens=8192)
    assert model.config._experts_implementation == "grouped_mm"


def test_weights_are_copied_for_each_token_where_that_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the grouped kernel asks the host. An expert's largest matrix has 64 × 32 values, a token two experts."""
    model = moe_model("olmoe")
    monkeypatch.setattr(expert_matmuls, "COPIED_BYTES", 10 * 2 * 64 * 32 * 4)
    set_expert_matmuls(model, most_tokens=11)
    assert model.config._experts_implementation == "grouped_mm"
    set_expert_matmuls(model, most_tokens=10)
    assert model.config._experts_implementation == "batched_mm"


def test_a_dense_model_stays_as_it_is() -> None:
    model = make_model("llama")
    before = model.config._experts_implementation
    set_expert_matmuls(model, most_tokens=4)
    assert model.config._experts_implementation == before


@torch.no_grad()
def test_both_ways_give_the_same() -> None:
    model, ids = moe_model("qwen3-moe"), torch.arange(9)[None]
    model.set_experts_implementation("eager")
    want = model(input_ids=ids).logits
    for way in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(way)
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
