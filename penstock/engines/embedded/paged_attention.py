"""Computes paged attention in plain torch: an engine's backend behind `penstock.models.attention`.

Each layer has one pool of blocks; a token's key and value lie side by side in it. A pass first writes its own
tokens into their slots, then gathers the blocks of each rectangle's sequences and attends over them. Grouped
query heads are folded into the query length, so no key is ever repeated.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from penstock.engines.embedded.batch_layout import Layout, Rectangle
from penstock.models.attention_options import AttentionOptions
from penstock.models.transfer import upload


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Describes what one layer caches for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class ShapeProbe:
    """Records what each layer would cache, as an attention backend for a pass of one token."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2)


class PagedAttention:
    """Owns the cache of all layers, and attends over it. `begin` sets the layout of the next pass."""

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout: Layout | None = None
        self._shapes = shapes
        self.scratch = num_blocks
        """A block that no sequence owns: padding rows of a batch write there."""
        self.pools: dict[int, torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}
        for layer, shape in shapes.items():
            size = (num_blocks + 1, block_size, shape.kv_heads, shape.key_dim + shape.value_dim)
            self.pools[layer] = _zeros(size, dtype, device)
            self._slots[layer] = self.pools[layer].flatten(0, 1)

    def begin(self, layout: Layout, copies: list[tuple[int, int]]) -> None:
        """Start a pass: set its layout and make its block copies."""
        self._layout = layout
        self.copy_blocks(copies)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) whose owners diverge."""
        if copies:
            device = next(iter(self.pools.values())).device
            sources, targets = upload(np.array(copies, dtype=np.int64).T, device)
            for pool in self.pools.values():
                raw = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                raw.index_copy_(0, targets, raw.index_select(0, sources))

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        layout = self._layout
        assert layout is not None, "begin comes before a forward pass"
        layer: int = module.layer_idx  # type: ignore[assignment]
        shape, pool = self._shapes[layer], self.pools[layer]
        self._slots[layer].index_copy_(0, layout.slots, torch.cat([key, value], dim=3)[0].transpose(0, 1))
        outputs = []
        for rectangle in layout.rectangles:
            found = pool.index_select(0, rectangle.table)
            found = found.view(rectangle.rows, rectangle.num_keys, shape.kv_heads, -1).transpose(1, 2)
            past, content = found[..., : shape.key_dim], found[..., shape.key_dim :]
            folded = _fold(query, rectangle, shape.kv_heads)
            bias = rectangle.bias(options.sliding_window, query.shape[1] // shape.kv_heads, query.dtype)
            if options.is_plain:
                mixed = functional.scaled_dot_product_attention(
                    folded, past, content, attn_mask=bias, scale=options.scaling
                )
            else:
                mixed = _attend(folded, past, content, bias, options)
            outputs.append(_unfold(mixed, rectangle, query.shape[1]))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU the pages are taken from the system only once they are written to."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    flat = torch.from_numpy(np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8))
    return flat.view(dtype).view(size)


def _fold(query: torch.Tensor, rectangle: Rectangle, kv_heads: int) -> torch.Tensor:
    """Put the queries of one key head side by side: (rows, kv_heads, groups * width, dim)."""
    _, heads, tokens, dim = query.shape
    part = query[0]
    if rectangle.num_tokens != tokens:
        part = part[:, rectangle.start : rectangle.start + rectangle.num_tokens]
    if rectangle.width == 1:
        return part.transpose(0, 1).reshape(rectangle.rows, kv_heads, heads // kv_heads, dim)
    if rectangle.gather is not None:
        part = part.index_select(1, rectangle.gather)
    split = part.reshape(kv_heads, heads // kv_heads, rectangle.rows, rectangle.width, dim)
    return split.permute(2, 0, 1, 3, 4).reshape(rectangle.rows, kv_heads, -1, dim)


def _unfold(mixed: torch.Tensor, rectangle: Rectangle, heads: int) -> torch.Tensor:
    """Put the results back into the order of the pass: (tokens, heads, dim)."""
    rows, kv_heads, _, dim = mixed.shape
    if rectangle.width == 1:
        return mixed.reshape(rows, heads, dim)
    split = mixed.reshape(rows, kv_heads, heads // kv_heads, rectangle.width, dim).permute(0, 3, 1, 2, 4)
    flat = split.reshape(rows * rectangle.width, heads, dim)
    return flat if rectangle.scatter is None else flat.index_select(0, rectangle.scatter)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend without the fused kernel, for what it lacks: capped scores and attention sinks. Scores are in
    float32, as the trainer's are."""
    scores = torch.matmul(query, key.transpose(2, 3)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores + bias
    if options.sinks is not None:
        rows, kv_heads, queries, _ = scores.shape
        per_head = options.sinks.to(scores.dtype).view(kv_heads, -1)
        column = per_head.repeat_interleave(queries // per_head.shape[1], dim=1)
        scores = torch.cat([scores, column[None, :, :, None].expand(rows, -1, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.matmul(weights[..., : key.shape[2]], value)
