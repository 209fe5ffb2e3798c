"""`builtin:arithmetic`: the tasks that come with the library."""

from typing import Any

from penstock.demo import arithmetic
from penstock.errors import TaskError
from penstock.types import Task

SIZES = {"train": 4096, "heldout": 256}


def make_rows(name: str, arguments: dict[str, Any]) -> list[Task]:
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
    return arithmetic.make_tasks(split, size=size, seed=seed)
