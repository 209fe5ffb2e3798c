"""Defines the methods that engines call on vLLM's workers through `/collective_rpc`.

`--worker-extension-cls` names the class below. vLLM adds it to its worker class, so `self` is the worker.
"""

from dataclasses import asdict
from typing import Any

DESCRIBED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
)
"""The sizes that the served and the trained model must agree on."""


class PenstockWorker:
    """Adds methods to vLLM's worker. Every name begins with `penstock_` to avoid clashes with the worker's own."""

    def penstock_describe(self) -> dict[str, Any]:
        """Return the sizes, dtype and settings of the model that this worker serves."""
        worker: Any = self
        config = worker.vllm_config.model_config
        outputs = getattr(worker.vllm_config, "aux_output_config", None)
        sizes = {name: getattr(config.hf_text_config, name, None) for name in DESCRIBED}
        return {
            "sizes": {name: size for name, size in sizes.items() if size is not None},
            "dtype": str(config.dtype).removeprefix("torch."),
            "num_workers": worker.vllm_config.parallel_config.world_size,
            "transfer": getattr(worker.vllm_config.weight_transfer_config, "backend", ""),
            "device": str(worker.device),
            "returns_experts": bool(getattr(outputs, "enable_return_routed_experts", False)),
        }

    def penstock_stage(self, update: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._penstock_backend.stage(update)
        return answer

    def penstock_staged(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._penstock_backend.staged()
        return answer

    def penstock_drop(self) -> None:
        self._penstock_backend.drop()

    def penstock_outcome(self) -> dict[str, Any]:
        return asdict(self._penstock_backend.outcome)

    @property
    def _penstock_backend(self) -> Any:
        worker: Any = self
        return worker.weight_transfer_engine
