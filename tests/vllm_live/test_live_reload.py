"""How layers are reloaded and verified inside vLLM, in one process of its own Python: dense models and mixtures."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.vllm_live.live import forward_logprobs
from tests.vllm_live.reload_check import PROMPTS

SCRIPT = Path(__file__).parent / "reload_check.py"
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES: dict[str, Any] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mixture": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
        )
    ),
}


def ask_vllm(vllm: str, script: Path, *arguments: str) -> dict[str, Any]:
    """What a script says that vLLM's own Python runs."""
    result = subprocess.run(
        [str(Path(vllm).parent / "python"), str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [each for each in result.stdout.splitlines() if each.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_reloaded_layers_compute_what_the_new_weights_say(vllm: str, tmp_path: Path, family: str) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(FAMILIES[family]().eval())
        models[-1].save_pretrained(tmp_path / str(seed))
    found = ask_vllm(vllm, SCRIPT, str(tmp_path / "0"), str(tmp_path / "1"))
    for name, model in (("first", models[0]), ("second", models[1]), ("third", models[0])):
        for prompt, got in zip(PROMPTS, found[name], strict=True):
            assert got == pytest.approx(forward_logprobs(model, prompt[:1], prompt[1:]), abs=1e-3), name
    assert found["reloaded"] == found["again"] == {"error": "", "unverified": []}
    assert "q_proj" in found["damaged"]["error"]
