"""Describes the embedded engine as an engine kind. The controller reads this without importing torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.kinds import SAMPLING, EngineKind
from penstock.errors import UserError
from penstock.models.config import LoraConfig
from penstock.records import Interrupt

if TYPE_CHECKING:
    from penstock.engines.config import EngineConfig

CAPABILITIES = (
    *SAMPLING,
    "forks",
    "prefix_cache",
    "sampling_mask",
    "adapters",
    "dora",
    "merged_adapters",
    "delta",
    "shards",
    "exact_resume",
    *(f"interrupt:{each}" for each in get_args(Interrupt)),
)
"""What every embedded engine can do. With a tokenizer it also has `stop_strings`, and `routing` if it records
experts."""


def _can(section: "EngineConfig", lora: LoraConfig | None) -> tuple[str, ...]:
    return (*CAPABILITIES, "stop_strings", "routing")


def _for_adapter(settings: EmbeddedConfig, lora: LoraConfig, on_head: bool) -> Mapping[str, Any]:
    """Keep room for the adapter, and merge what can't be served otherwise: DoRA, and an adapter on the output
    embedding."""
    merges = lora.dora or on_head
    if merges and settings.adapters == "unmerged":
        merged_for = "model.lora.dora=true" if lora.dora else "an adapter on the output embedding"
        raise UserError(
            f"engine.embedded.adapters must be auto or merged with {merged_for}, which has no other way, "
            "got unmerged"
        )
    return {
        "max_adapters": max(1, settings.max_adapters),
        "max_adapter_rank": max(settings.max_adapter_rank, lora.rank),
        "adapters": "merged" if merges else settings.adapters,
    }


EMBEDDED = EngineKind(
    opener="penstock.engines.embedded.opening:open_embedded",
    settings=EmbeddedConfig,
    can=_can,
    computes_here=True,
    lowered="max_batch",
    repeats_with={"max_batch": 1, "prefix_cache": False},
    for_adapter=_for_adapter,
)
