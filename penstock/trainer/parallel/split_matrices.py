"""Tensor parallelism: ranks split the matrices of each layer, by the plan that transformers has for the model.

Every rank of a tensor group runs the same rows. It has some heads of each attention and some columns of each MLP;
what they give is summed over the group, and so are gradients of their inputs. Embeddings are split by
vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from penstock.errors import UserError

Place = tuple[nn.Module, str]


def split_matrices(model: Any, mesh: DeviceMesh) -> None:
    """In place, before FSDP splits what each rank has left. Weights that were one stay one."""
    tied = [places for places in _places(model).values() if len(places) > 1]
    apply_tensor_parallelism(model, mesh)
    for places in tied:
        first, *others = (module._parameters[name] for module, name in places)
        if any(_placements(first) != _placements(other) for other in others):
            raise UserError(
                f"trainer.parallel.tensor must be 1 for {type(model).__name__}: transformers' plan splits weights "
                "in two ways that are one weight; use trainer.parallel.shard"
            )
        for module, name in places:
            module._parameters[name] = first


def _places(model: nn.Module) -> Mapping[int, list[Place]]:
    """Which modules have each weight."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def _placements(weight: Any) -> Any:
    return getattr(weight, "placements", None)
