"""Computes attention of prompts by torch's own variable-length kernels, where those can read a paged cache.

`torch.nn.attention.varlen` supports block tables in newer versions of torch, and only with a flash attention that
can page (FA3, FA4). That is installed beside torch and switched on with `activate_flash_attention_impl`; the one
that comes with torch can't page. Where all of this is available it replaces `prefill_attention`, whose kernels
serve all other cases. Before its first use, its result for a few random sequences is compared with that of our
kernel, which is used instead after an error or a difference.
"""

import functools
import inspect
import logging
from typing import Any

import torch
from torch.nn import attention

from penstock.engines.embedded.cuda.kernels.prefill_attention import QueryTiles, attend_packed
from penstock.models.attention_options import AttentionOptions
from penstock.models.precision import HALF_TYPES

log = logging.getLogger(__name__)

PAGING = ("FA3", "FA4")
TOLERANCE = 0.02
"""Relative to the norm, since both round to 16 bits."""
TRIED = ((5, 5), (1, 300), (40, 77), (130, 200))
"""Queries and keys of the sequences that are compared: a whole prompt, one token, and parts of prompts."""
TRIED_WINDOW = 33


def serves(query: torch.Tensor, pool: torch.Tensor, options: AttentionOptions) -> bool:
    """Return whether torch can attend to this cache: keys and values of one width, in 16 bits, without extras."""
    current = getattr(attention, "current_flash_attention_impl", lambda: None)
    return (
        options.is_plain
        and pool.dtype == query.dtype
        and query.dtype in HALF_TYPES
        and pool.shape[3] == 2 * query.shape[2]
        and _varlen() is not None
        and current() in PAGING
        and _agrees(
            tuple(query.shape[1:]), tuple(pool.shape[1:]), options.sliding_window is not None, query.dtype
        )
    )


def attend_varlen(
    query: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    options: AttentionOptions,
    *,
    most_queries: int,
    most_keys: int,
) -> torch.Tensor:
    """Attend as `prefill_attention.attend_packed` does: the last queries of each sequence, side by side, over
    its blocks."""
    dim = query.shape[2]
    # A window counts the query's own key; torch counts the keys to its left.
    left = -1 if options.sliding_window is None else options.sliding_window - 1
    mixed: torch.Tensor = _varlen()(
        query,
        pool[..., :dim],
        pool[..., dim:],
        query_starts,
        None,
        most_queries,
        most_keys,
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != pool.shape[2],
        seqused_k=lengths,
        block_table=tables,
    )
    return mixed


@functools.cache
def _varlen() -> Any:
    """Return `varlen_attn` if it takes block tables in this version of torch."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


@functools.cache
def _agrees(
    query_shape: tuple[int, int], block_shape: tuple[int, int, int], windowed: bool, dtype: torch.dtype
) -> bool:
    """Return whether torch's kernel and ours agree on random sequences of this shape."""
    (heads, dim), (block_size, kv_heads, _) = query_shape, block_shape
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator().manual_seed(0)
    counts, lengths = zip(*TRIED, strict=True)
    columns = -(-max(lengths) // block_size)
    blocks = torch.randperm(len(TRIED) * columns, generator=draw, dtype=torch.int32)
    pool = torch.randn(len(blocks), *block_shape, generator=draw).to(device, dtype)
    query = torch.randn(sum(counts), *query_shape, generator=draw).to(device, dtype)
    tables = blocks.view(len(TRIED), columns).to(device)
    tiles = QueryTiles.of(counts, heads // kv_heads, device)
    keys = torch.tensor(lengths, dtype=torch.int32, device=device)
    options = AttentionOptions(scaling=dim**-0.5, sliding_window=TRIED_WINDOW if windowed else None)
    ours = attend_packed(query, pool[..., :dim], pool[..., dim:], tables, keys, tiles, options).float()
    try:
        theirs = attend_varlen(
            query, pool, tables, keys, tiles.query_starts, options,
            most_queries=max(counts), most_keys=max(lengths),
        ).float()  # fmt: skip
    except Exception as error:  # a package beside torch may raise anything: ours serves as well
        log.warning("torch's variable-length attention is not used: %s", error)
        return False
    difference = float((theirs - ours).norm() / ours.norm())
    if not difference < TOLERANCE:
        log.warning("torch's variable-length attention is not used: it is off by %.2g", difference)
    return difference < TOLERANCE
