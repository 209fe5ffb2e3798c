"""Procedural tasks from reasoning-gym. The whole entry travels with the task, so that its own verifier can
score an answer in another process (`penstock.scoring.gym`)."""

import json
from typing import Any

from penstock.errors import MissingExtraError, TaskError

DATASET_COLUMN = "reasoning_gym"
ENTRY_COLUMN = "entry"


def make_rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError(
            "reasoning_gym: tasks need reasoning-gym: pip install 'penstock[reasoning-gym]'"
        ) from error
    options = {"size": 500, "seed": 0, **arguments}
    try:
        entries = list(reasoning_gym.create_dataset(name, **options))
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(
            f"reasoning_gym dataset {name!r} could not be made with {options}: {error}"
        ) from error
    return [
        {
            "id": f"{name}-{options['seed']}-{index}",
            "prompt": entry["question"],
            "answer": entry["answer"],
            DATASET_COLUMN: name,
            ENTRY_COLUMN: json.loads(json.dumps(entry, default=str)),
        }
        for index, entry in enumerate(entries)
    ]
