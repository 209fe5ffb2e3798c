"""The vLLM engine as a kind. The controller reads this without vLLM."""

from typing import TYPE_CHECKING, get_args

from penstock.engines.kinds import EngineKind
from penstock.engines.vllm.config import VllmConfig
from penstock.models.config import LoraConfig
from penstock.types import Interrupt

if TYPE_CHECKING:
    from penstock.engines.config import EngineConfig

CAPABILITIES = (
    "logprobs",
    "versions",
    "greedy",
    "seed",
    "truncation",
    "penalties",
    "logit_bias",
    "min_tokens",
    "priority",
    "prefix_cache",
    "stop_strings",
)
"""Of every vLLM engine."""


def interrupts(*, with_adapter: bool) -> tuple[Interrupt, ...]:
    """An answer keeps the adapter that it began with, so an adapter's update waits for the answers' ends."""
    return ("drain",) if with_adapter else get_args(Interrupt)


def _can(section: "EngineConfig", lora: LoraConfig | None) -> tuple[str, ...]:
    own = tuple(f"interrupt:{each}" for each in interrupts(with_adapter=lora is not None))
    return (*CAPABILITIES, "shards", "adapters", "routing", *own)


def _num_gpus(settings: VllmConfig) -> int:
    return settings.tensor_parallel


VLLM = EngineKind(
    opener="penstock.engines.vllm.vllm_opening:open_vllm", settings=VllmConfig, can=_can, num_gpus=_num_gpus
)
