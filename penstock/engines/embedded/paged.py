"""Paged attention in plain torch: the engine's backend behind `penstock.models.attention`.

Keys and values of every layer live in one pool of blocks. A pass first writes its own keys and values
into their slots, then gathers the blocks of each rectangle's sequences and attends over them. Grouped query
heads are folded into the query length, so no key is ever repeated.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from penstock.engines.embedded.layout import Layout, Rectangle


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class ShapeProbe:
    """A backend that only writes down what each layer would cache; for one token."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2)


class PagedAttention:
    """The cache of all layers, and attention over it. `begin` says what the next pass looks like."""

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
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for layer, shape in shapes.items():
            size = (num_blocks, block_size, shape.kv_heads)
            self._keys[layer] = torch.zeros(*size, shape.key_dim, dtype=dtype, device=device)
            self._values[layer] = torch.zeros(*size, shape.value_dim, dtype=dtype, device=device)

    def begin(self, layout: Layout, copies: list[tuple[int, int]]) -> None:
        """Make the block copies of this pass, then expect its layers."""
        self._layout = layout
        if copies:
            sources = torch.tensor([source for source, _ in copies], device=layout.slots.device)
            targets = torch.tensor([target for _, target in copies], device=layout.slots.device)
            for pool in (*self._keys.values(), *self._values.values()):
                pool.index_copy_(0, targets, pool.index_select(0, sources))

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        layout = self._layout
        assert layout is not None, "begin comes before a forward pass"
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self._keys[layer], self._values[layer]
        keys.flatten(0, 1).index_copy_(0, layout.slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, layout.slots, value[0].transpose(0, 1))
        outputs = []
        for rectangle in layout.rectangles:
            past, content = _gather(keys, rectangle), _gather(values, rectangle)
            groups = query.shape[1] // past.shape[1]
            folded = _fold(query[0], rectangle, past.shape[1])
            bias = rectangle.bias(sliding_window, groups, query.dtype)
            if softcap is None and sinks is None:
                mixed = functional.scaled_dot_product_attention(
                    folded, past, content, attn_mask=bias, scale=scaling
                )
            else:
                mixed = _attend(folded, past, content, bias, scaling, softcap, sinks)
            outputs.append(_unfold(mixed, rectangle, groups))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _gather(pool: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """(rows, kv_heads, num_keys, dim) of the rectangle's sequences."""
    blocks = pool.index_select(0, rectangle.table)
    return blocks.view(rectangle.rows, rectangle.num_keys, *pool.shape[2:]).transpose(1, 2)


def _fold(query_HTD: torch.Tensor, rectangle: Rectangle, kv_heads: int) -> torch.Tensor:
    """(rows, kv_heads, groups * width, dim): the queries of one key head side by side."""
    heads, _, dim = query_HTD.shape
    part = query_HTD[:, rectangle.start : rectangle.start + rectangle.num_tokens]
    if rectangle.gather is not None:
        part = part.index_select(1, rectangle.gather)
    split = part.reshape(kv_heads, heads // kv_heads, rectangle.rows, rectangle.width, dim)
    return split.permute(2, 0, 1, 3, 4).reshape(rectangle.rows, kv_heads, -1, dim)


def _unfold(mixed: torch.Tensor, rectangle: Rectangle, groups: int) -> torch.Tensor:
    """(tokens, heads, dim): back to the order of the pass."""
    rows, kv_heads, _, dim = mixed.shape
    split = mixed.reshape(rows, kv_heads, groups, rectangle.width, dim).permute(0, 3, 1, 2, 4)
    flat = split.reshape(rows * rectangle.width, kv_heads * groups, dim)
    return flat if rectangle.scatter is None else flat.index_select(0, rectangle.scatter)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention by hand, for what the fused one lacks: capped scores, and sinks that take their share."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + bias
    if sinks is not None:
        rows, kv_heads, queries, _ = scores.shape
        per_head = sinks.to(scores.dtype).view(kv_heads, -1)
        column = per_head.repeat_interleave(queries // per_head.shape[1], dim=1)
        scores = torch.cat([scores, column[None, :, :, None].expand(rows, -1, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., : key.shape[2]], value)
