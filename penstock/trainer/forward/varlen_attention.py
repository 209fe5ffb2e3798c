"""Uses torch's variable-length flash attention where it exists: a packed row in one call, without padding."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.models.attention_options import AttentionOptions
from penstock.models.precision import HALF_TYPES
from penstock.models.transfer import upload
from penstock.records import IntArray

VarlenFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Marks where the sequences of a packed row begin and end, separately for queries and keys."""

    queries: torch.Tensor
    """(sequences + 1,), int32, on the row's device."""
    keys: torch.Tensor
    longest_query: torch.Tensor
    """(tokens, 0): only the first size matters. A compiled graph serves any tensor size, but only one number."""
    longest_key: torch.Tensor

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str,
        key_lengths: Sequence[int] | None = None,
    ) -> "Boundaries":
        """Compute boundaries from lengths. If a sequence has more keys than queries, the queries are its last
        tokens."""
        device = torch.device(device)
        queries = upload(_offsets(lengths), device)
        keys = queries if key_lengths is None else upload(_offsets(key_lengths), device)
        return cls(
            queries=queries,
            keys=keys,
            longest_query=torch.empty((max(lengths), 0), device=device),
            longest_key=torch.empty((max(lengths if key_lengths is None else key_lengths), 0), device=device),
        )


def _offsets(lengths: Sequence[int]) -> IntArray:
    return np.cumsum([0, *lengths], dtype=np.int32)


def find_varlen(device: torch.device | str) -> VarlenFunction | None:
    """Return torch's function with the arguments that `attend` passes, or None if there is none for the device."""
    if torch.device(device).type != "cuda":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known or "window_size" not in known:
        return None
    # Versions without this argument always share keys among query heads.
    chosen: Any = functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn
    function: VarlenFunction = chosen
    return function


def fits(query: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> bool:
    """Return whether the kernel supports this attention: half precision, equal head sizes (multiples of 8, at most
    256), no soft-cap and no sinks."""
    width = query.shape[-1]
    return (
        query.dtype in HALF_TYPES
        and options.is_plain
        and width == value.shape[-1]
        and width <= 256
        and width % 8 == 0
    )


def attend(
    function: VarlenFunction,
    boundaries: Boundaries,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Compute causal attention of (tokens, heads, dim) rows."""
    # The kernel counts the keys to the left of a query; a window counts the query's own too.
    left = -1 if options.sliding_window is None else options.sliding_window - 1
    return function(
        query,
        key,
        value,
        boundaries.queries,
        boundaries.keys,
        boundaries.longest_query.shape[0],
        boundaries.longest_key.shape[0],
        scale=options.scaling,
        window_size=(left, 0),
    )
