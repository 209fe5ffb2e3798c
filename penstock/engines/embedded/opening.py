"""Opens the embedded engine in a worker: loads the model, then prepares the GPU. `embedded_kind.py` names it."""

import asyncio
from pathlib import Path

from penstock.config.unresolved import AUTO
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.paged_attention_check import check_paged_attention
from penstock.engines.kinds import EngineParts
from penstock.models.adapter_merge import merge_adapter
from penstock.models.compilation import is_worth_compiling
from penstock.models.load import load_model, resolve_device
from penstock.models.lora_targets import target_layers
from penstock.models.outline import outline_of
from penstock.models.support import check_supported, load_config
from penstock.models.tokenizer import ChatTokenizer, max_positions


async def open_embedded(parts: EngineParts) -> EmbeddedEngine:
    """Load the model and open the engine. What takes long runs in a thread, so the worker keeps answering
    meanwhile."""
    config = parts.config
    device = resolve_device(parts.device if config.device == "auto" else config.device)
    model = await asyncio.to_thread(
        load_model,
        parts.model,
        dtype=config.dtype,
        device=device,
        trust_remote_code=parts.trust_remote_code,
    )
    if parts.adapter:
        await asyncio.to_thread(merge_adapter, model, Path(parts.adapter))
    limit = config.max_context or max_positions(model.config)
    await asyncio.to_thread(check_paged_attention, model.config, limit)
    engine = EmbeddedEngine(
        model,
        config=config,
        receiver=parts.receiver,
        tokenizer=ChatTokenizer(parts.model, trust_remote_code=parts.trust_remote_code),
        name=parts.name,
        versions=parts.versions,
        blobs=parts.blobs,
    )
    if parts.lora is not None and not parts.adapter:
        engine.expect_adapter(target_layers(model, parts.lora), parts.lora.rank)
    await asyncio.to_thread(engine.warm_up)
    return engine


def without_auto(model: str, config: EngineConfig, *, trust_remote_code: bool = False) -> EngineConfig:
    """Resolve the `auto` settings of an engine outside a run: one alone, or behind `penstock serve`."""
    embedded = config.embedded
    if embedded.compile == AUTO:
        count = 0
        if config.device != "cpu":
            check_supported(load_config(model, trust_remote_code=trust_remote_code))
            count = outline_of(model, trust_remote_code=trust_remote_code).num_parameters
        chosen = "on" if is_worth_compiling(config.device, count) else "off"
        embedded = embedded.model_copy(update={"compile": chosen})
    # Routes are recorded for a trainer; no request over HTTP asks for them.
    routing = "off" if config.record_routing == AUTO else config.record_routing
    return config.model_copy(update={"embedded": embedded, "record_routing": routing})
