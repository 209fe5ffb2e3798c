"""The `tasks` section: where prompts come from. `eval` holds one of its own for held-out tasks."""

from typing import Any

from pydantic import Field

from penstock.config import Section


class TasksConfig(Section):
    """Where tasks come from: prompts, and the columns that their rewards need."""

    source: str = "builtin:arithmetic"
    """`FILE.jsonl`, `datasets:NAME`, `reasoning_gym:NAME`, `module:function`, `file.py:function`, or
    `builtin:arithmetic`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source: of the function, of `datasets.load_dataset` (`split`, `name`, …), of
    `reasoning_gym.create_dataset` (`size`, `seed`, …), of the built-in (`split`, `size`, `seed`)."""
    prompt: str = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""
    columns: tuple[str, ...] | None = None
    """The other columns to keep for the reward; unset keeps all."""
    as_chat: bool = False
    """Turn string prompts into one user message, so that the model's chat template is applied."""
    system: str | None = None
    """A system message put before chat prompts that have none; needs chat messages or `as_chat`."""
    limit: int = Field(default=0, ge=0)
    """Take only the first so many tasks; 0 takes all."""
    shuffle: bool = True
    """Draw the order anew for every pass over the tasks."""
