"""The `tasks` section: where prompts come from. `eval` holds one of its own for held-out tasks."""

from typing import Any

from pydantic import Field, model_validator

from penstock.config import Section


class TasksConfig(Section):
    """Where tasks come from. A plain string stands for a section with that `source`."""

    source: str = "builtin:arithmetic"
    """`builtin:arithmetic`, a path ending in .jsonl, `datasets:NAME`, `reasoning_gym:NAME`, `module:function`
    or `path/to/file.py:function`."""
    split: str = "train"
    """The split of a `datasets` dataset; for `builtin:arithmetic`, `train` or `heldout`."""
    subset: str | None = None
    """The configuration name of a `datasets` dataset that has several (`main` of `openai/gsm8k`)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the source: of the function, of `datasets.load_dataset`, of the reasoning_gym
    dataset (`size`, `seed`, …), of `builtin:arithmetic` (`size`, `seed`)."""
    prompt: str = "prompt"
    """The column that holds the prompt: a string, or chat messages."""
    columns: tuple[str, ...] | None = None
    """The other columns to keep for the reward; null keeps all."""
    as_chat: bool = False
    """Turn string prompts into one user message, so that the model's chat template is applied."""
    system: str | None = None
    """A system message put before chat prompts that have none; needs chat messages or `as_chat`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many tasks; null uses all."""
    shuffle: bool = True
    """Take the tasks in a new random order in every epoch, instead of the source's order."""
    seed: int = 0
    """Decides the order of the tasks, and which tasks a procedural source makes."""

    @model_validator(mode="before")
    @classmethod
    def _accept_short_form(cls, data: Any) -> Any:
        return {"source": data} if isinstance(data, str) else data
