"""Makes the built-in task: add two three-digit numbers.

A prompt is `214+387=` and the answer `601`. Prompts are split by their checksum into a training part and a
held-out tenth, so that no held-out problem is ever trained on, whatever the size or the seed of either list.
The built-in model's supervised start uses the same split.
"""

import random
import zlib
from typing import Any, Literal

from penstock.errors import TaskError
from penstock.records import Task

Split = Literal["train", "heldout"]

OPERANDS = range(100, 450)
"""Operands whose every sum has three digits."""
HELD_OUT_MODULUS = 10


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_MODULUS == 0


def make_tasks(split: Split, *, size: int, seed: int) -> list[Task]:
    """Return `size` different problems of the split, or all if there are fewer. The same arguments give the same
    tasks."""
    prompts = [(a, b) for a in OPERANDS for b in OPERANDS if is_held_out(f"{a}+{b}=") == (split == "heldout")]
    rng = random.Random(f"{split}-{seed}")
    return [
        Task(id=f"{a}+{b}", prompt=f"{a}+{b}=", columns={"answer": str(a + b)})
        for a, b in rng.sample(prompts, min(size, len(prompts)))
    ]


SIZES = {"train": 4096, "heldout": 256}


def make_rows(name: str, arguments: dict[str, Any]) -> list[Task]:
    """Return the tasks of the source `builtin:arithmetic`, after checking its arguments."""
    if name != "arithmetic":
        raise TaskError(f"the only built-in task set is builtin:arithmetic, got builtin:{name}")
    unknown = arguments.keys() - {"split", "size", "seed"}
    if unknown:
        raise TaskError(f"builtin:arithmetic takes split, size and seed, got {sorted(unknown)[0]!r}")
    split = arguments.get("split", "train")
    if split not in SIZES:
        raise TaskError(f"the split of builtin:arithmetic must be train or heldout, got {split!r}")
    size, seed = arguments.get("size", SIZES[split]), arguments.get("seed", 0)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TaskError(f"the size of builtin:arithmetic must be a whole number >= 1, got {size!r}")
    return make_tasks(split, size=size, seed=seed)
