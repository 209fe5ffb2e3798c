"""Describes the embedded engine as an engine kind. The controller reads this without importing torch."""

from typing import TYPE_CHECKING, get_args

from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.kinds import SAMPLING, EngineKind
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


EMBEDDED = EngineKind(
    opener="penstock.engines.embedded.opening:open_embedded",
    settings=EmbeddedConfig,
    can=_can,
    computes_here=True,
    lowered="max_batch",
)
