"""A Hugging Face tokenizer as rollouts and engines use it: prompts in, text out. Needs no torch.

We never pad (batches are packed), so a tokenizer without a pad token is as good as any other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import TaskError, UserError
from penstock.types import Message, Task


class ChatTokenizer:
    """`penstock.interfaces.Tokenizer` over `AutoTokenizer`."""

    def __init__(self, name_or_path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the tokenizer of {name_or_path!r} could not be loaded: {_first_line(error)}"
            ) from error
        self._stop = _stop_tokens(name_or_path, self._tokenizer)

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        """Plain text as it is; messages through the chat template, ready for the assistant to speak."""
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if not self._tokenizer.chat_template:
            raise TaskError(
                "the tasks' prompts are chat messages but the model's tokenizer has no chat template; "
                "use plain string prompts, or a model made for chat"
            )
        messages = [{"role": message.role, "content": message.content} for message in prompt]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the tokenizer and of the model's generation config."""
        return self._stop

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def model_context(name_or_path: str) -> int:
    """The longest sequence that the model was made for, from its config alone."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError, KeyError) as error:
        hint = "" if Path(name_or_path).exists() else " (no such folder here, nor in the hub's cache)"
        raise UserError(f"model {name_or_path!r} could not be loaded{hint}: {_first_line(error)}") from error
    text = config.get_text_config()
    return int(
        getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 20
    )


def check_prompts(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, *, max_context: int, max_new_tokens: int
) -> None:
    """Refuse prompts that leave no room for an answer, before anything heavy starts."""
    for task in tasks:
        length = len(tokenizer.encode_prompt(task.prompt))
        if length == 0:
            raise TaskError(f"task {task.id} has an empty prompt: it encodes to no token at all")
        if length + max_new_tokens > max_context:
            raise TaskError(
                f"the prompt of task {task.id} has {length} tokens; with rollout.max_new_tokens="
                f"{max_new_tokens} it does not fit the context of {max_context} tokens: shorten one of them"
            )


def _stop_tokens(name_or_path: str, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    ids: list[int] = []
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    try:
        eos = GenerationConfig.from_pretrained(name_or_path).eos_token_id
    except (OSError, ValueError):
        eos = None
    ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(ids))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
