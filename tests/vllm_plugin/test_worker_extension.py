from types import SimpleNamespace
from typing import Any

import pytest

from penstock.vllm_plugin.worker_extension import PenstockWorker


def worker(**more: Any) -> Any:
    """What vLLM's worker class has of its config."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(vocab_size=14, num_experts=8), dtype="torch.bfloat16"
        ),
        parallel_config=SimpleNamespace(world_size=2),
        weight_transfer_config=SimpleNamespace(backend="penstock"),
        **more,
    )
    return SimpleNamespace(vllm_config=config, device="cuda:0")


@pytest.mark.parametrize("returns", [True, False])
def test_a_worker_tells_what_it_serves(returns: bool) -> None:
    flag = SimpleNamespace(enable_return_routed_experts=returns)
    assert PenstockWorker.penstock_describe(worker(aux_output_config=flag)) == {
        "sizes": {"vocab_size": 14, "num_experts": 8},
        "dtype": "bfloat16",
        "num_workers": 2,
        "transfer": "penstock",
        "device": "cuda:0",
        "returns_experts": returns,
    }


def test_a_vllm_without_the_flag_tells_no_experts() -> None:
    assert PenstockWorker.penstock_describe(worker())["returns_experts"] is False
