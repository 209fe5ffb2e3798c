from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from penstock.models.load import load_model
from penstock.models.published import as_checkpoint, published_tensors, wire_dtypes


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("score_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.score_bias = nn.Buffer(torch.zeros(3))
        self.steps = nn.Buffer(torch.tensor(7))
        self.inner = nn.Module()
        self.inner.register_buffer("inv_freq", torch.ones(2), persistent=False)


def test_parameters_and_persistent_buffers_are_published_and_tied_ones_once() -> None:
    model = Router()
    tensors = published_tensors(model)
    assert list(tensors) == ["embed.weight", "score_bias", "steps"]
    assert tensors["score_bias"] is model.score_bias


def test_what_a_model_keeps_in_float32_travels_in_float32() -> None:
    assert wire_dtypes(Router(), torch.bfloat16) == {
        "embed.weight": torch.bfloat16,
        "score_bias": torch.float32,
        "steps": torch.int64,
    }


@pytest.mark.processes
def test_the_trainer_sends_what_an_engine_of_fewer_bits_holds(tmp_path: Path) -> None:
    """DeepSeek's router has a buffer that is trained and stays in float32."""
    config = DeepseekV3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    trained = load_model(str(tmp_path), dtype="float32")
    served = published_tensors(load_model(str(tmp_path), dtype="bfloat16"))
    assert wire_dtypes(trained, torch.bfloat16) == {name: tensor.dtype for name, tensor in served.items()}
    assert served["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_joined_experts_become_one_tensor_each() -> None:
    gate_up = torch.arange(2 * 4 * 3).view(2, 4, 3)
    down = torch.arange(2 * 3 * 2).view(2, 3, 2)
    found = dict(
        as_checkpoint(
            {
                "l.mlp.experts.gate_up_proj": gate_up,
                "l.mlp.experts.down_proj": down,
                "l.mlp.gate.weight": down[0],
                "l.mlp.down_proj.weight": down[1],
            }.items()
        )
    )
    assert list(found) == [
        "l.mlp.experts.0.gate_proj.weight",
        "l.mlp.experts.0.up_proj.weight",
        "l.mlp.experts.1.gate_proj.weight",
        "l.mlp.experts.1.up_proj.weight",
        "l.mlp.experts.0.down_proj.weight",
        "l.mlp.experts.1.down_proj.weight",
        "l.mlp.gate.weight",
        "l.mlp.down_proj.weight",
    ]
    assert torch.equal(found["l.mlp.experts.1.up_proj.weight"], gate_up[1, 2:])
    assert torch.equal(found["l.mlp.experts.1.down_proj.weight"], down[1])
