"""Computes which rank does what: pure arithmetic, without torch, so that the controller plans with it.

    rank = ((data · shards + shard) · contexts + context) · tensors + tensor

Ranks of one tensor group are neighbours, so they are on one machine wherever machines are filled in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.trainer.config import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Computes the coordinates of one rank among all, in each dimension."""

    parallel: ParallelConfig
    rank: int

    @property
    def size(self) -> int:
        return self.parallel.num_ranks

    @property
    def tensor(self) -> int:
        return self.rank % self.parallel.tensor

    @property
    def context(self) -> int:
        return self.rank // self.parallel.tensor % self.parallel.context

    @property
    def plan(self) -> int:
        """Return the index of the plan that this rank trains on. Ranks that differ only in tensor or context
        share one."""
        return self.rank // (self.parallel.tensor * self.parallel.context)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Return the sizes of the device mesh. Ranks that split a sequence split the weights too, so they count
        as shards."""
        parallel = self.parallel
        return {
            "data": parallel.data,
            "shard": parallel.shard * parallel.context,
            "tensor": parallel.tensor,
        }

    @property
    def mesh_coordinate(self) -> dict[str, int]:
        sizes = self.mesh_sizes
        data, rest = divmod(self.rank, sizes["shard"] * sizes["tensor"])
        shard, tensor = divmod(rest, sizes["tensor"])
        return {"data": data, "shard": shard, "tensor": tensor}

    @property
    def reports(self) -> bool:
        """Return whether this rank's metrics count: only the first of the ranks with one plan reports."""
        return self.tensor == 0 and self.context == 0

    @property
    def is_sharded(self) -> bool:
        """Return whether weights are split. Otherwise every rank has all of them."""
        return self.parallel.shard * self.parallel.context * self.parallel.tensor > 1


def num_plans(parallel: ParallelConfig) -> int:
    return parallel.data * parallel.shard


def groups_of(parallel: ParallelConfig, *fixed: str) -> list[list[int]]:
    """Return all ranks, in groups that agree in the dimensions named."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(parallel.num_ranks):
        at = RankLayout(parallel=parallel, rank=rank)
        groups.setdefault(tuple(getattr(at, name) for name in fixed), []).append(rank)
    return list(groups.values())


def check_layout(parallel: ParallelConfig, model: Any) -> None:
    """Refuse sizes that do not divide the heads of a model; `model` is its Hugging Face config."""
    text = model.get_text_config() if hasattr(model, "get_text_config") else model
    heads = getattr(text, "num_attention_heads", None) or 0
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    for name, size in (("tensor", parallel.tensor), ("context", parallel.context)):
        if size > 1 and heads % size:
            raise ConfigError(
                f"trainer.parallel.{name} must divide the model's {heads} attention heads, got {size}; use "
                f"{_choices(_divisors(heads))}"
            )
    if parallel.tensor > 1 and key_heads % parallel.tensor:
        raise ConfigError(
            f"trainer.parallel.tensor must divide the model's {key_heads} key and value heads, got "
            f"{parallel.tensor}; use {_choices(_divisors(key_heads))}"
        )
    own = heads // parallel.tensor
    if parallel.tensor > 1 and own % parallel.context:
        raise ConfigError(
            f"trainer.parallel.context must divide the {own} attention heads that tensor={parallel.tensor} leaves "
            f"each rank, got {parallel.context}; use {_choices(_divisors(own))}"
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _choices(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
