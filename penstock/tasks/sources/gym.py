"""Makes tasks with reasoning_gym: `reasoning_gym:NAME` for one dataset, `reasoning_gym:mix` for several by
weight. The verifier is in `penstock.scoring.gym_verifier`."""

from typing import Any

from penstock.errors import TaskError
from penstock.scoring.gym_verifier import COLUMN, create_dataset, pack
from penstock.tasks.task_rows import plain

MIX = "mix"


def make_rows(name: str, arguments: dict[str, Any], *, prompt: str = "prompt") -> list[dict[str, Any]]:
    """Make one row per entry, with the question in the column `prompt`. For a mix, the argument `datasets` holds
    the arguments of each dataset, with a `weight` (1 by default); `size` counts all together."""
    if name == MIX:
        return _mixed(arguments, prompt)
    options = {"size": 500, "seed": 0, **arguments}
    return [
        {
            "id": f"{name}-{options['seed']}-{index}",
            prompt: entry["question"],
            "answer": entry["answer"],
            COLUMN: {"name": name, "arguments": pack(options), "entry": pack(plain(entry))},
        }
        for index, entry in enumerate(create_dataset(name, options))
    ]


def _mixed(arguments: dict[str, Any], prompt: str) -> list[dict[str, Any]]:
    """Mix datasets evenly, so that every part of the list has about the weights of the whole."""
    datasets = arguments.get("datasets")
    unknown = arguments.keys() - {"datasets", "size", "seed"}
    if unknown or not isinstance(datasets, dict) or not datasets:
        raise TaskError(
            "reasoning_gym:mix takes datasets (a dict of names and their arguments), size and seed, got "
            f"{sorted(arguments)}"
        )
    given = {name: dict(options or {}) for name, options in datasets.items()}
    weights = {name: options.pop("weight", 1) for name, options in given.items()}
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not weight > 0:
            raise TaskError(
                f"the weight of {name!r} in reasoning_gym:mix must be a number > 0, got {weight!r}"
            )
    order = _order(weights, int(arguments.get("size", 500)))
    rows = {
        name: iter(
            make_rows(
                name, {"seed": arguments.get("seed", 0), **options, "size": order.count(name)}, prompt=prompt
            )
        )
        for name, options in given.items()
        if name in order
    }
    return [next(rows[name]) for name in order]


def _order(weights: dict[str, float], size: int) -> list[str]:
    """Order datasets so that the one furthest behind its share comes next."""
    total = sum(weights.values())
    taken = dict.fromkeys(weights, 0)
    order = []
    for number in range(1, size + 1):
        behind = {name: weight / total * number - taken[name] for name, weight in weights.items()}
        chosen = max(behind, key=lambda name: behind[name])
        taken[chosen] += 1
        order.append(chosen)
    return order
