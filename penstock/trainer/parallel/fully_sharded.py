"""Shards a model with FSDP2: each rank keeps a part of every weight, its gradient and its optimizer states.

A layer's weights are gathered when it runs and released after, or stay until `release_gathered` releases them
before the update (`trainer.gather`). The gradient is a plain sum over ranks: losses are over the denominators of
the whole step, so nothing is divided.

Two bugs that raise no error are avoided here. A divide factor acts on one module, not on those inside it, so
it is set on all of them. A factor other than 1 is applied twice in a group of one rank (torch 2.13), or makes
NCCL's sums in bfloat16 zero (pytorch#190745), so it is 1.0 and the reduction is set to a sum explicitly.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from penstock.trainer.forward.checkpointing import layers_of
from penstock.trainer.forward.packed_model import WITHIN, call
from penstock.trainer.parallel.process_ranks import ProcessRanks


def shard_model(
    model: nn.Module, ranks: ProcessRanks, *, computes_in: torch.dtype, keeps: bool = False
) -> None:
    """Split the weights of a model in place, layer by layer. Masters keep their format (float32); layers compute
    in `computes_in`, and gradients are summed in float32. With `keeps`, gathered weights stay until
    `release_gathered`."""
    parallel = ranks.layout.parallel
    mesh = ranks.mesh["data", "shard"] if parallel.data > 1 else ranks.mesh["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=None if computes_in == torch.float32 else computes_in,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if keeps and isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False, recurse=False)
    setattr(type(model), WITHIN, _within)
    register_fsdp_forward_method(model, WITHIN)
    sum_gradients_of(model)


def sum_gradients_of(model: nn.Module) -> None:
    """Make every part of a sharded model sum its gradients, undivided."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _within(self: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    return call(function, *args)
