"""Puts one attention operator in front of the GPU kernels, whatever kind of pass is run.

Code that `torch.compile` made must serve prompts and decoding, batches of every size, and every layer. So the
operator's arguments are what the layer itself knows. Where the tokens of the pass lie is looked up when it runs:
each attention module has its layer's pool as an attribute, and each pool has the engine's `CurrentPass`. Compiled
code passes a pool on unchanged, so engines that share that code still find their own pass.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from penstock.engines.embedded.cuda.kernels import paged_varlen as varlen
from penstock.engines.embedded.cuda.kernels.decode_attention import attend_decode
from penstock.engines.embedded.cuda.kernels.expert_record import record_decoded, record_packed
from penstock.engines.embedded.cuda.kernels.prefill_attention import QueryTiles, attend_packed
from penstock.models.attention_options import AttentionOptions

FLOAT8_MAX = 448.0


class Plan(Protocol):
    """Says where the tokens of a pass lie."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor: ...

    def record(self, ids: torch.Tensor, record: torch.Tensor, block_size: int) -> torch.Tensor:
        """Write ids (tokens, k) into the rows of `record` that are the tokens' slots; return a copy of the ids."""


@dataclass(slots=True)
class CurrentPass:
    """Holds the pass that one engine runs, or captures, right now."""

    plan: Plan | None = None


@dataclass(slots=True)
class DecodePlan:
    """Lays out one token per sequence: row i of the buffers."""

    tables: torch.Tensor
    positions: torch.Tensor
    splits: int = 1

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        return attend_decode(
            query, key, value, pool, self.tables, self.positions, options, splits=self.splits
        )

    def record(self, ids: torch.Tensor, record: torch.Tensor, block_size: int) -> torch.Tensor:
        return record_decoded(
            ids, record, tables=self.tables, positions=self.positions, block_size=block_size
        )


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Lays out some tokens of each sequence, side by side."""

    slots: torch.Tensor
    """(tokens,): where each token's key and value go, in tokens from the start of the pool."""
    tables: torch.Tensor
    lengths: torch.Tensor
    tiles: QueryTiles
    most_queries: int
    most_keys: int

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        dim = query.shape[2]
        pair, raw = torch.cat([key, value], dim=-1), pool.dtype
        if pool.dtype == torch.float8_e4m3fn:
            # Some versions of torch turn larger values into NaN.
            pair = pair.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(pool.dtype)
            raw = torch.uint8  # not every copy kernel supports 8-bit floats
        pool.flatten(0, 1).view(raw).index_copy_(0, self.slots, pair.view(raw))
        if varlen.serves(query, pool, options):
            return varlen.attend_varlen(
                query,
                pool,
                self.tables,
                self.lengths,
                self.tiles.query_starts,
                options,
                most_queries=self.most_queries,
                most_keys=self.most_keys,
            )
        keys, values = pool[..., :dim], pool[..., dim:]
        return attend_packed(query, keys, values, self.tables, self.lengths, self.tiles, options)

    def record(self, ids: torch.Tensor, record: torch.Tensor, block_size: int) -> torch.Tensor:
        return record_packed(ids, record, slots=self.slots)


@torch.library.custom_op("penstock::attend_paged", mutates_args=("pool",))
def attend_paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    sliding_window: int,
) -> torch.Tensor:
    """Write keys and values (tokens, kv_heads, dim) into `pool` and attend, as the pool's pass says. 0 switches
    `softcap` and `sliding_window` off."""
    current: CurrentPass = pool._penstock_pass  # type: ignore[attr-defined]
    assert current.plan is not None, "a plan comes before a forward pass"
    options = AttentionOptions(
        scaling=scaling, sliding_window=sliding_window or None, softcap=softcap or None, sinks=sinks
    )
    return current.plan.attend(query, key, value, pool, options)


@attend_paged.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    sliding_window: int,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


class DeviceAttention:
    """Calls the kernels for `penstock.models.attention`, in all passes on a GPU."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        pool: torch.Tensor = module._penstock_pool  # type: ignore[assignment]
        mixed: torch.Tensor = attend_paged(
            query[0].transpose(0, 1).contiguous(),  # models leave them so that this copies nothing
            key[0].transpose(0, 1).contiguous(),
            value[0].transpose(0, 1),  # a part of the joined matmul: only its last dimension must be dense
            pool,
            options.sinks,
            float(options.scaling),
            float(options.softcap or 0.0),
            int(options.sliding_window or 0),
        )
        return mixed[None]


def attach_pools(model: nn.Module, pools: dict[int, torch.Tensor], current: CurrentPass) -> None:
    """Give each attention module the pool of its layer, and each pool the pass of its engine."""
    for pool in pools.values():
        pool._penstock_pass = current  # type: ignore[attr-defined]
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None:
            object.__setattr__(module, "_penstock_pool", pools[int(layer)])
