"""The `tasks` section: where prompts come from."""

from typing import Any

from pydantic import Field

from penstock.config import Section


class TasksConfig(Section):
    """Where tasks come from: prompts, and the columns that their rewards need."""

    source: str = "builtin:arithmetic"
    """`FILE.jsonl`, `datasets:NAME`, `reasoning_gym:NAME`, `module:function`, `file.py:function`, or
    `builtin:arithmetic`."""
    prompt: str = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source: of the function, of `datasets.load_dataset` (`split`, `name`, …), of
    `reasoning_gym.create_dataset` (`size`, `seed`, …), of the built-in (`split`, `size`)."""
    limit: int = Field(default=0, ge=0)
    """Take only the first so many tasks; 0 takes all."""
    shuffle: bool = True
    """Draw the order anew for every pass over the tasks."""
