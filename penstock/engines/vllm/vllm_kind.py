"""Registers the vLLM engine as a kind. The controller imports this without vLLM."""

from typing import TYPE_CHECKING, get_args

from penstock.engines.kinds import SAMPLING, EngineKind
from penstock.engines.vllm.config import VllmConfig
from penstock.models.config import LoraConfig
from penstock.records import Interrupt

if TYPE_CHECKING:
    from penstock.engines.config import EngineConfig

CAPABILITIES = (*SAMPLING, "prefix_cache", "stop_strings")
"""Capabilities of every vLLM engine."""


def interrupts(*, with_adapter: bool, with_routing: bool) -> tuple[Interrupt, ...]:
    """Return the interrupts that a vLLM engine supports. An answer keeps the adapter that it began with, so an
    adapter's update waits for running answers to end. vLLM recomputes KV with live routers, so where experts
    are recorded, interrupts that recompute parts of an answer are excluded."""
    if with_adapter:
        return ("drain",)
    every: tuple[Interrupt, ...] = get_args(Interrupt)
    again = ("inflight_recompute", "abort_resume") if with_routing else ()
    return tuple(each for each in every if each not in again)


def _can(section: "EngineConfig", lora: LoraConfig | None) -> tuple[str, ...]:
    possible = interrupts(with_adapter=lora is not None, with_routing=section.record_routing == "on")
    own = tuple(f"interrupt:{each}" for each in possible)
    # On a CPU vLLM does not tell the experts that it chooses. A joined server may run elsewhere.
    routing = () if section.device == "cpu" and not section.vllm.urls else ("routing",)
    return (*CAPABILITIES, "shards", "adapters", *routing, *own)


def _num_gpus(settings: VllmConfig) -> int:
    return settings.tensor_parallel


VLLM = EngineKind(
    opener="penstock.engines.vllm.vllm_opening:open_vllm", settings=VllmConfig, can=_can, num_gpus=_num_gpus
)
