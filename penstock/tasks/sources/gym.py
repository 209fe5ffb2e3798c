"""`reasoning_gym:NAME`: procedural tasks. Their verifiers are `penstock.scoring.gym_verifier`."""

from typing import Any

from penstock.gym_datasets import COLUMN, create_dataset, pack
from penstock.tasks.task_rows import plain


def make_rows(name: str, arguments: dict[str, Any], *, prompt: str = "prompt") -> list[dict[str, Any]]:
    """One row an entry; `prompt` is the column that the config asks for."""
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
