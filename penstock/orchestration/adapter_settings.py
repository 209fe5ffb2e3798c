"""What a run that trains an adapter changes in its config: the adapter's settings, and room for it in engines."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.engines.config import EngineConfig
from penstock.errors import UserError
from penstock.orchestration.config import PenstockConfig

if TYPE_CHECKING:
    from penstock.models.adapter_check import CheckedAdapter


def resolve_adapter(
    config: PenstockConfig, model: str, *, saved: bool, log: Callable[[str], None]
) -> tuple[PenstockConfig, "CheckedAdapter | None"]:
    """The config as the adapter needs it, and what the adapter amounts to. `saved`: a run goes on with its own.
    Only for adapters: the layers of a model need torch, which takes seconds to import."""
    if not config.model.trains_adapter:
        return config, None
    from penstock.models.adapter_check import check_adapter

    checked = check_adapter(config.model, model, saved=saved)
    log(str(checked))
    if "learning_rate" not in config.trainer.model_fields_set:
        log(
            f"trainer.learning_rate is {config.trainer.learning_rate:g}, the default for all weights; adapters "
            "usually learn best with about ten times as much"
        )
    updates = {
        "model": config.model.model_copy(update={"lora": checked.lora}),
        "engine": engine_with_adapter(config.engine, checked),
    }
    return config.model_copy(update=updates), checked


def engine_with_adapter(section: EngineConfig, adapter: "CheckedAdapter") -> EngineConfig:
    """Engines keep room for the adapter, and merge what has no other way: DoRA, and the output embedding's."""
    embedded, lora = section.embedded, adapter.lora
    merged_for = "model.lora.dora=true" if lora.dora else "an adapter on the output embedding"
    merges = lora.dora or adapter.is_on_head
    if merges and embedded.adapters == "unmerged":
        raise UserError(
            f"engine.embedded.adapters must be auto or merged with {merged_for}, which has no other way, "
            "got unmerged"
        )
    updates = {
        "max_adapters": max(1, embedded.max_adapters),
        "max_adapter_rank": max(embedded.max_adapter_rank, lora.rank),
        "adapters": "merged" if merges else embedded.adapters,
    }
    return section.model_copy(update={"embedded": embedded.model_copy(update=updates)})
