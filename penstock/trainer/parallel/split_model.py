"""A model that was loaded whole into host memory, split onto the devices of all ranks as the layout says."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import UserError
from penstock.trainer.dummy_batch import filler
from penstock.trainer.forward.gathered_weights import let_go
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.parallel.fully_sharded import shard_model

if TYPE_CHECKING:
    from penstock.trainer.config import TrainerConfig
    from penstock.trainer.parallel.process_ranks import ProcessRanks

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far logprobs may move when sums are split, as a share of the largest. A plan that is wrong moves them by far
more."""


def split_model(packed: PackedModel, parallel: "ProcessRanks", config: "TrainerConfig", device: str) -> None:
    """In place, layer by layer: matrices first, then what each rank has left of them."""
    computes_in = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32

    def shard(model: Any) -> None:
        shard_model(model, parallel, computes_in=computes_in, keeps=config.gather == "step")

    if parallel.layout.parallel.tensor > 1:
        _split_matrices(packed, parallel, shard, computes_in, device)
    else:
        packed.split(shard, device)
    if parallel.context is not None:
        from penstock.trainer.parallel.split_sequences import SplitAttention, SplitSequences

        context = SplitSequences(parallel.context)
        packed.split_rows(context, lambda attention: SplitAttention(attention, context))


def _split_matrices(
    packed: PackedModel,
    parallel: "ProcessRanks",
    shard: Callable[[Any], None],
    computes_in: torch.dtype,
    device: str,
) -> None:
    """Other people's plans: the split model must say of a few tokens what the whole one says."""
    from penstock.trainer.parallel.split_matrices import split_matrices

    name, whole = type(packed.model).__name__, _probe(packed, "cpu")

    def split(model: Any) -> None:
        split_matrices(model, parallel.mesh["tensor"])
        shard(model)

    packed.split(split, device)
    moved = float((_probe(packed, device) - whole).abs().max() / whole.abs().max().clamp_min(1.0))
    if not moved <= TOLERANCE[computes_in]:
        raise UserError(
            f"trainer.parallel.tensor must be 1 for {name}: split by transformers' plan, its "
            f"logprobs differ by {moved:.2g} of the largest; use trainer.parallel.shard"
        )


@torch.no_grad()
def _probe(packed: PackedModel, device: str) -> torch.Tensor:
    found = packed(filler(packed.model, device), replays_routing=False).logprobs.float().cpu()
    let_go(packed.model)
    return found
