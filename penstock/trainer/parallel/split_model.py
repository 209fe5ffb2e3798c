"""Splits a model that was loaded whole into host memory over the devices of all ranks, as the layout says.

Tensor parallelism comes first, by the plan that transformers has for the model. Every rank of a tensor group
runs the same rows, with some heads of each attention and some columns of each MLP. Their results are summed
over the group, and so are gradients of their inputs. Embeddings are split by vocabulary. FSDP2 then splits
what each rank has left.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from penstock.errors import UserError
from penstock.trainer.forward.dummy_batch import filler
from penstock.trainer.forward.packed_model import PackedModel, release_gathered
from penstock.trainer.parallel.fully_sharded import shard_model

if TYPE_CHECKING:
    from penstock.trainer.config import TrainerConfig
    from penstock.trainer.parallel.process_ranks import ProcessRanks


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far logprobs may move when sums are split, as a share of the largest. A wrong plan moves them by far more."""


def split_model(packed: PackedModel, parallel: "ProcessRanks", config: "TrainerConfig", device: str) -> None:
    """Split a model in place: matrices first, by tensor parallelism, then each rank's part of them, layer by
    layer."""
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
    """Split by transformers' plan, and check it: a few tokens must get the same logprobs from the split model as
    from the whole."""
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
    release_gathered(packed.model)
    return found


Owner = tuple[nn.Module, str]


def split_matrices(model: Any, mesh: DeviceMesh) -> None:
    """Split the matrices of a model in place. Tied weights stay tied."""
    tied = [owners for owners in _owners(model).values() if len(owners) > 1]
    apply_tensor_parallelism(model, mesh)
    for owners in tied:
        first, *others = (module._parameters[name] for module, name in owners)
        if any(_placements(first) != _placements(other) for other in others):
            raise UserError(
                f"trainer.parallel.tensor must be 1 for {type(model).__name__}: transformers' plan splits weights "
                "in two ways that are one weight; use trainer.parallel.shard"
            )
        for module, name in owners:
            module._parameters[name] = first


def _owners(model: nn.Module) -> Mapping[int, list[Owner]]:
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return owners


def _placements(weight: Any) -> Any:
    return getattr(weight, "placements", None)
