"""Runs the model's own forward pass over a batch, with the paged cache behind its attention."""

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.engines.embedded.adapters.adapted_linear import detach_stacks
from penstock.engines.embedded.adapters.row_slots import HostSlots
from penstock.engines.embedded.batch_layout import lay_out
from penstock.engines.embedded.cache_sizing import adapter_bytes, count_blocks, device_memory
from penstock.engines.embedded.config import EmbeddedConfig, RecordRouting
from penstock.engines.embedded.joined_projections import join_projections
from penstock.engines.embedded.model_preparation import (
    compile_layers,
    keep_logits_in_float32,
    set_expert_matmuls,
)
from penstock.engines.embedded.paged_attention import LayerShape, PagedAttention, ShapeProbe
from penstock.engines.embedded.route_store import BlockRoutes, RouteStore
from penstock.engines.embedded.scheduler import Batch
from penstock.errors import UserError
from penstock.models import attention
from penstock.models.compilation import has_triton
from penstock.models.routing import Recording, Routers, find_routers, unwatch

if TYPE_CHECKING:
    from penstock.engines.embedded.cuda.device import Device
    from penstock.engines.embedded.cuda.device_routes import DeviceRoutes

log = logging.getLogger(__name__)

PREFILL_CHUNK = {"cpu": 512, "cuda": 8192}
"""Prompt tokens of a pass that keep a device busy, unless the config names a number."""


class ModelRunner:
    """Owns the cache tensors of `model`, which must be a Hugging Face causal LM.

    The model is switched to our attention; other code that shares the instance must not run it meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EmbeddedConfig,
        *,
        max_context: int = 0,
        record_routing: RecordRouting = "off",
    ) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        text_config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.vocab_size = int(text_config.vocab_size)
        self.max_context = _max_context(text_config, max_context)
        self.block_size = config.block_size
        self.slots = HostSlots(self.device)
        self.prefill_chunk = PREFILL_CHUNK.get(self.device.type, PREFILL_CHUNK["cpu"])
        detach_stacks(model)
        unwatch(model)
        for module in model.modules():  # what an earlier engine left: its cache, its compiled layers
            module.__dict__.pop("_penstock_pool", None)
            module._compiled_call_impl = None
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        if config.logits == "float32":
            keep_logits_in_float32(model)
        attention.register()
        model.set_attn_implementation(attention.IMPLEMENTATION)  # type: ignore[operator]
        self.shapes = shapes = self._probe(text_config)
        self._routers = self._find_routers(record_routing)
        dtype = self._cache_dtype(config)
        self.num_blocks = count_blocks(
            config,
            bytes_per_token=dtype.itemsize * sum(shape.num_values for shape in shapes.values())
            + (self._routers.shape.token_bytes if self._routers is not None else 0),
            max_context=self.max_context,
            vocabulary=self.vocab_size,
            memory=device_memory(self.device),
            adapters=adapter_bytes(config, model),
        )
        self.cache = PagedAttention(
            shapes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=dtype,
            device=self.device,
        )
        self.routes: BlockRoutes | None = None
        self._host_routes: RouteStore | None = None
        if self.device.type == "cpu":
            self._open_host_routes()
        attention.attach(model, self.cache)

    def _find_routers(self, record: RecordRouting) -> Routers | None:
        """Return the routers whose choices are recorded, or None if none are."""
        if record == "off":
            return None
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            routers = find_routers(self.model, lambda: self._run(one, one, one[0]))
            if routers is None and record == "on":
                raise UserError(
                    f"engine.record_routing=on needs a model with experts, and {type(self.model).__name__} has "
                    "none; use auto or off"
                )
        except UserError as error:
            if record == "on":
                raise
            log.warning("engine.record_routing=auto is off: %s", error)
            return None
        return routers

    def _open_host_routes(self) -> None:
        if self._routers is not None:
            self._routers.watch()
            self.routes = self._host_routes = RouteStore(
                self._routers.shape, num_blocks=self.num_blocks, block_size=self.block_size
            )

    def open_device_routes(self) -> "DeviceRoutes | None":
        """Open the record that passes on a GPU write themselves. Returns None if nothing is recorded."""
        if self._routers is None:
            return None
        from penstock.engines.embedded.cuda.device_routes import DeviceRoutes

        self.routes = routes = DeviceRoutes(
            self._routers, num_blocks=self.num_blocks, block_size=self.block_size, device=self.device
        )
        return routes

    def _cache_dtype(self, config: EmbeddedConfig) -> torch.dtype:
        if config.kv_dtype == "auto":
            return next(self.model.parameters()).dtype
        if self.device.type != "cuda":
            raise UserError(
                f"engine.embedded.kv_dtype=float8 needs a GPU, and the engine runs on {self.device.type}"
            )
        return torch.float8_e4m3fn

    def open_device(self, config: EmbeddedConfig, versions: Mapping[str, int]) -> "Device | None":
        """Prepare the model for a GPU and return the device that runs it, or None on a CPU."""
        if self.device.type != "cuda":
            return None
        if not has_triton():
            raise UserError("an engine on a GPU needs triton: pip install 'penstock[gpu]'")
        from penstock.engines.embedded.cuda.device import Device

        join_projections(self.model)
        most_tokens = max(config.max_batch, config.prefill_chunk or self.prefill_chunk)
        set_expert_matmuls(self.model, most_tokens=most_tokens)
        if config.compile == "on":
            compile_layers(self.model, len(self.shapes))
        return Device(
            self.model,
            self.cache,
            vocab=self.vocab_size,
            max_batch=config.max_batch,
            max_context=self.max_context,
            block_size=self.block_size,
            window=config.window,
            versions=versions,
            max_adapters=config.max_adapters,
            routes=self.open_device_routes(),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch; returns logits (spans, vocabulary) of the last token of every span that ends its
        sequence. Other spans have no row, and the rest keeps the order of the spans."""
        layout = lay_out(batch.spans, self.block_size, self.device)
        self.cache.begin(layout, batch.copies)
        self.slots.begin((seq.policy for seq, _, _ in batch.spans), layout.owners)
        ends = [
            number
            for number, (seq, start, count) in enumerate(batch.spans)
            if start + count == seq.num_tokens
        ]
        rows = torch.from_numpy(layout.last[ends]).to(self.device)
        if self._routers is None or self._host_routes is None:
            return self._run(layout.input_ids, layout.positions, rows)
        self._host_routes.copy_blocks(batch.copies)
        replay = self._host_routes.replay(batch.spans, layout.owners, self.device)
        recording = Recording(self._routers.shape.num_layers, replay)
        with self._routers.observed_by(recording):
            logits = self._run(layout.input_ids, layout.positions, rows)
        self._host_routes.write(layout.slots, recording.ids)
        return logits

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        keep: dict[str, Any] = {"logits_to_keep": rows} if self._selects_rows else {}
        output = self.model(input_ids=input_ids, position_ids=positions, use_cache=False, **keep)
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_rows else logits.index_select(0, rows)

    @torch.inference_mode()
    def _probe(self, text_config: Any) -> dict[int, LayerShape]:
        """Learn from one forward pass of one token what each layer caches, whatever the model."""
        probe = ShapeProbe()
        attention.attach(self.model, probe)
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._run(one, one, one[0])
        if len(probe.shapes) != int(text_config.num_hidden_layers):
            raise UserError(
                "the embedded engine serves models in which every layer has attention; "
                f"{type(self.model).__name__} has {text_config.num_hidden_layers} layers "
                f"and {len(probe.shapes)} attentions"
            )
        return probe.shapes


def _max_context(text_config: Any, wanted: int) -> int:
    limit = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    if wanted and limit and wanted > limit:
        raise UserError(f"engine.max_context must be <= {limit}, the model's own limit, got {wanted}")
    if not (wanted or limit):
        raise UserError("the model config gives no maximum context length; set engine.max_context")
    return wanted or limit
