"""Published tensors under the names of checkpoints, which is what servers of others load.

Our tensors are named as transformers' modules are. They differ from checkpoints in one thing: the experts of a
mixture are one tensor there, and one tensor each in a checkpoint.
"""

from collections.abc import Iterable, Iterator
from typing import Any

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def as_checkpoint(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each tensor as it is; joined experts one by one."""
    for name, tensor in tensors:
        if name.endswith(GATE_UP) and tensor.ndim == 3:
            stem = name.removesuffix(".gate_up_proj")
            half = tensor.shape[1] // 2
            for number, expert in enumerate(tensor):
                yield f"{stem}.{number}.gate_proj.weight", expert[:half]
                yield f"{stem}.{number}.up_proj.weight", expert[half:]
        elif name.endswith(DOWN) and tensor.ndim == 3:
            stem = name.removesuffix(".down_proj")
            for number, expert in enumerate(tensor):
                yield f"{stem}.{number}.down_proj.weight", expert
        else:
            yield name, tensor
