"""Defines the `tasks` section: where prompts come from. `eval` holds another one for held-out tasks."""

from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.config import Section


class TasksConfig(Section):
    """Sets where tasks come from: prompts, and the columns that their rewards need."""

    source: str = "builtin:arithmetic"
    """`FILE.jsonl`, `datasets:NAME`, `reasoning_gym:NAME`, `module:function`, `file.py:function`, or
    `builtin:arithmetic`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source: of the function, of `datasets.load_dataset` (`split`, `name`, …), of
    `reasoning_gym.create_dataset` (`size`, `seed`, …; of `reasoning_gym:mix` the `datasets`, by name, each
    with its arguments and a `weight`), of the built-in (`split`, `size`, `seed`)."""
    prompt: str = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""
    columns: tuple[str, ...] | None = None
    """The other columns to keep, for rewards and workflows; unset keeps all."""
    as_chat: bool | Literal["auto"] = "auto"
    """Turn string prompts into one user message, so that the model's chat template is applied. `auto`: where
    its tokenizer has a template."""
    system: str | None = None
    """A system message put before chat prompts that have none; needs chat messages or `as_chat`."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template beside the messages, for example `{enable_thinking: false}`; also used for
    held-out prompts."""
    limit: int = Field(default=0, ge=0)
    """Take only this many tasks, the first ones. 0 takes all; a function may then yield at most a million."""
    curriculum: str | None = None
    """`module:function` or `file.py:function` of `curriculum(task, rewards)`, which returns whether a task may be
    used now. `rewards` has the mean reward of each kind of task (a reasoning_gym dataset, or the column `kind`)."""
    shuffle: bool = True
    """Shuffle the tasks anew for every pass."""

    @field_validator("template_args")
    @classmethod
    def _leave_ours(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        ours = sorted({"tokenize", "add_generation_prompt", "return_dict", "conversation"} & arguments.keys())
        if ours:
            raise ValueError(f"tasks.template_args must not have {ours[0]!r}, which the run sets itself")
        return arguments
