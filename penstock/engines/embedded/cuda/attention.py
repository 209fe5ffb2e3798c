"""The decode step's attention: one query per sequence, over static buffers that a graph can replay."""

from dataclasses import dataclass

import torch
from torch import nn

from penstock.engines.embedded.cuda.kernels import paged_decode
from penstock.engines.embedded.paged import LayerShape

HEAD_DIMS = (32, 64, 128, 256)


@dataclass(slots=True)
class DecodeBuffers:
    """What a decode step reads and moves on, a row per sequence; a graph of batch B uses the first B."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    output_tokens: torch.Tensor
    """(rows, window): what was drawn since the window began."""
    output_logprobs: torch.Tensor
    step: torch.Tensor
    """(1,): the column of the window that comes next."""

    @classmethod
    def make(
        cls, rows: int, num_table: int, window: int, scratch: int, device: torch.device
    ) -> "DecodeBuffers":
        def filled(*size: int, dtype: torch.dtype, value: float = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        return cls(
            tokens=filled(rows, dtype=torch.int64),
            positions=filled(rows, dtype=torch.int64),
            tables=filled(rows, num_table, dtype=torch.int32, value=scratch),
            seeds=filled(rows, dtype=torch.int64),
            temperatures=filled(rows, dtype=torch.float32, value=1.0),
            output_tokens=filled(rows, window, dtype=torch.int64),
            output_logprobs=filled(rows, window, dtype=torch.float32),
            step=filled(1, dtype=torch.int64),
        )


class DecodeAttention:
    """An attention backend for rows of one token each."""

    def __init__(self, pools: dict[int, torch.Tensor]) -> None:
        self._pools = pools
        self.tables = torch.empty(0)
        self.positions = torch.empty(0)
        self.splits = 1

    @staticmethod
    def serves(shapes: dict[int, LayerShape]) -> bool:
        return all(
            shape.key_dim == shape.value_dim and shape.key_dim in HEAD_DIMS for shape in shapes.values()
        )

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
        layer: int = module.layer_idx  # type: ignore[assignment]
        mixed: torch.Tensor = paged_decode(
            query[0].transpose(0, 1).contiguous(),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self._pools[layer],
            self.tables,
            self.positions,
            sinks,
            scaling,
            softcap or 0.0,
            sliding_window or 0,
            self.splits,
        )
        return mixed[None]
