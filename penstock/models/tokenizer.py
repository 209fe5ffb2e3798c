"""Wraps the model's tokenizer as rollouts need it: prompts to ids, ids to text, and the ids that stop.

Sequences are packed, never padded, so nothing here uses a pad token. A program that loads the trained model
may pad, and would choose a token itself if the tokenizer has none, so a run settles the pad token before it
starts. This module imports without torch and, until a tokenizer is loaded, without transformers.
"""

import difflib
import json
import unicodedata
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from penstock.errors import TaskError, UserError
from penstock.models.support import first_line, load_config
from penstock.records import Message, Task
from penstock.records.interfaces import Tokenizer

ANSWER = "\u2402answer\u2403"
"""Stands for an answer in a conversation that is rendered only to see what a template writes after one."""
IN_NO_VOCABULARY = "\U000323af"
"""A character so rare that tokenizers encode it as they do any character that they have no token for."""


VOCABULARY_FILES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
SHOWN = 12
"""How many unknown characters a line lists."""


class ChatTokenizer:
    """Implements `interfaces.Tokenizer` with the tokenizer in a Hugging Face folder or repository.

    A string prompt is tokenised as the tokenizer does by default, with a bos token if it adds one; an eos
    token that it appends is removed, since the prompt continues. Chat messages go through the chat template,
    opened for the assistant's answer. `template_args` are passed to the template. `pad_token` only matters
    when the tokenizer is saved.
    """

    def __init__(
        self,
        name_or_path: str,
        *,
        pad_token: str | None = None,
        trust_remote_code: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        self.name = name_or_path
        self._pad_token = pad_token
        self._template_args = dict(template_args or {})
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name_or_path, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            # What transformers raises depends on what is missing or broken in the folder.
            folder = Path(name_or_path)
            if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
                raise _without_vocabulary(name_or_path) from error
            raise UserError(
                f"the tokenizer of {name_or_path!r} could not be loaded: {first_line(error)}"
            ) from error
        if len(self._tokenizer) <= len(
            {*self._tokenizer.get_added_vocab(), *self._tokenizer.all_special_tokens}
        ):
            raise _without_vocabulary(name_or_path)
        self._unknown: dict[str, bool] = {}
        """Which of the characters seen so far have no token."""
        self._prompts = PromptCache(self._encode)
        self._stop_token_ids = _stop_token_ids(name_or_path, self._tokenizer.eos_token_id)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokenizer's eos and every end token that the model's generation config names."""
        return self._stop_token_ids

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def num_tokens(self) -> int:
        return len(self._tokenizer)

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        return self._prompts.token_ids(prompt)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def encode_reply(self, messages: tuple[Message, ...], *, after: int | None) -> list[int]:
        """Apply the template to a stand-in conversation, and encode what it writes after the stand-in answer. If
        the real answer ended with its own end token, that token is already there and is left out here."""
        stand_in = (Message(role="user", content="?"), Message(role="assistant", content=ANSWER))
        text = self._apply_template(_plain((*stand_in, *messages)), tokenize=False)
        _, found, following = text.rpartition(ANSWER)
        if not found:
            raise TaskError(
                f"the chat template of {self.name!r} drops or rewrites earlier answers, so messages can't be "
                "appended token-exactly; append text, or render the whole conversation"
            )
        token_ids = self.encode(following)
        closed = after in self._stop_token_ids and token_ids[:1] == [after]
        return token_ids[1:] if closed else token_ids

    @property
    def template(self) -> str:
        """Return the text of the chat template; empty if there is none or there are several."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else ""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Encode messages as a template takes them, tool calls included, opened for the assistant's answer."""
        token_ids: list[int] = self._apply_template(messages, tokenize=True, tools=tools, **template_args)
        return token_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        """Return the text whose ids `encode_chat` returns."""
        text: str = self._apply_template(messages, tokenize=False, tools=tools, **template_args)
        return text

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text, with special tokens by name or without them."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def unknown_characters(self, prompt: str | tuple[Message, ...]) -> set[str]:
        """Return the characters that the model would not see, since the tokenizer has no token for them. Spaces,
        accents and control characters may have become part of others."""
        texts = (prompt,) if isinstance(prompt, str) else tuple(message.content for message in prompt)
        return {char for text in texts for char in set(text) if self._is_unknown(char)}

    def _is_unknown(self, char: str) -> bool:
        if char not in self._unknown:
            is_visible = unicodedata.category(char)[0] not in "ZMC" and char != IN_NO_VOCABULARY
            self._unknown[char] = is_visible and self.encode(char) == self.encode(IN_NO_VOCABULARY)
        return self._unknown[char]

    def check_pad_token(self, log: Callable[[str], None]) -> None:
        """Refuse a pad token that is not in the vocabulary; log which one will be saved if the tokenizer has
        none."""
        if self._pad_token is not None and self._pad_token not in self._tokenizer.get_vocab():
            special = {*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}
            near = difflib.get_close_matches(self._pad_token, sorted(special), n=1, cutoff=0)
            hint = f"; its nearest special token is {near[0]!r}" if near else ""
            raise UserError(f"model.pad_token {self._pad_token!r} is not a token of {self.name!r}{hint}")
        if self._pad_token is None and self._tokenizer.pad_token is None:
            end = self._end_of_text()
            saved = "saved without one" if end is None else f"saved with its end of text, {end!r}, as one"
            log(f"the tokenizer of {self.name!r} has no pad token: {saved}; model.pad_token names another")

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside a model, as `from_pretrained` reads it, with a pad token."""
        pad_token = self._pad_token
        if pad_token is None and self._tokenizer.pad_token is None:
            pad_token = self._end_of_text()
        if pad_token is not None:
            self._tokenizer.pad_token = pad_token
        self._tokenizer.save_pretrained(folder)

    def _end_of_text(self) -> str | None:
        """Return the first end token that the model's own config names, since a tokenizer's may differ; None if
        there is none."""
        named = [end for end in _model_ends(self.name) if 0 <= end < self.num_tokens]
        end: str | None = self._tokenizer.eos_token
        return self._tokenizer.convert_ids_to_tokens(named[0]) if named else end

    def _encode(self, prompt: str | tuple[Message, ...]) -> list[int]:
        return self._encode_text(prompt) if isinstance(prompt, str) else self.encode_chat(_plain(prompt))

    def _encode_text(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, return_attention_mask=False)["input_ids"]
        eos = self._tokenizer.eos_token_id
        if token_ids and token_ids[-1] == eos and not text.endswith(self._tokenizer.eos_token):
            return token_ids[:-1]
        return token_ids

    def _apply_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool, **template_args: Any
    ) -> Any:
        """Apply the template to the messages, opened for the assistant's answer, and return text or ids."""
        if not self.has_template:
            raise TaskError(
                "the tasks' prompts are chat messages but the model's tokenizer has no chat template; "
                "use plain string prompts, or a model made for chat"
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                **(self._template_args | template_args),
                tokenize=tokenize,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:
            # A template is a program: it may refuse roles or their order with any message of its own.
            raise TaskError(f"the chat template of {self.name!r} refuses the prompt: {error}") from error


def _without_vocabulary(name_or_path: str) -> UserError:
    return UserError(
        f"the tokenizer of {name_or_path!r} has no vocabulary: it must have tokens beside its special ones; copy "
        "the model's tokenizer there (tokenizer.json, tokenizer_config.json)"
    )


def _plain(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def model_context(name_or_path: str, *, trust_remote_code: bool = False) -> int:
    """Return the longest sequence that the model was made for, from its config alone."""
    return max_positions(load_config(name_or_path, trust_remote_code=trust_remote_code))


def max_positions(config: Any) -> int:
    """Return the longest sequence that a model with this config was made for; a very large number if it does not
    say."""
    text = config.get_text_config()
    return int(
        getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 20
    )


def check_prompts(
    tasks: Sequence[Task], tokenizer: Tokenizer, *, max_context: int, max_new_tokens: int
) -> int:
    """Refuse the first prompt that can't be answered within the context. Return the length of the longest
    prompt."""
    longest = 0
    for task in tasks:
        length = len(tokenizer.encode_prompt(task.prompt))
        if length == 0:
            raise TaskError(f"task {task.id} has an empty prompt: it encodes to no token at all")
        if length + max_new_tokens > max_context:
            raise TaskError(
                f"the prompt of task {task.id} has {length} tokens; with rollout.max_new_tokens="
                f"{max_new_tokens} it does not fit the context of {max_context} tokens: shorten one of them"
            )
        longest = max(longest, length)
    return longest


def warn_of_unknown_characters(
    prompts: Sequence[str | tuple[Message, ...]], tokenizer: ChatTokenizer, log: Callable[[str], None]
) -> None:
    """Name the characters of prompts that the model would not see."""
    found = [unknown for prompt in prompts if (unknown := tokenizer.unknown_characters(prompt))]
    if found:
        chars = sorted(set().union(*found))
        more = f" and {len(chars) - SHOWN} more" if len(chars) > SHOWN else ""
        log(
            f"the tokenizer of {tokenizer.name!r} has no token for {', '.join(map(repr, chars[:SHOWN]))}{more} "
            f"(in {len(found):,} of {len(prompts):,} prompts): the model does not see them"
        )


def _stop_token_ids(name_or_path: str, eos_token_id: int | None) -> tuple[int, ...]:
    own = [] if eos_token_id is None else [eos_token_id]
    return tuple(sorted({*own, *_model_ends(name_or_path)}))


def _model_ends(name_or_path: str) -> list[int]:
    """Return the end tokens that the model's generation config names, or else its config, in their order."""
    for file_name in ("generation_config.json", "config.json"):
        value = _read_json(name_or_path, file_name).get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else [value]
    return []


def _read_json(name_or_path: str, file_name: str) -> dict[str, Any]:
    """Read a JSON file of the model, from its folder or the hub's cache; return an empty dict if it has none."""
    path: str | None = str(Path(name_or_path) / file_name)
    if not Path(name_or_path).is_dir():
        from transformers.utils import cached_file

        path = cached_file(
            name_or_path,
            file_name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if path is None or not Path(path).is_file():
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON object: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object but a {type(content).__name__}")
    return content


P = TypeVar("P", bound=Hashable)

MAX_TOKENS = 1 << 21
"""8 MiB at four bytes each."""


class PromptCache(Generic[P]):
    """Encodes each prompt once while it is cached. A run needs each of its prompts when it checks them, then
    again in every episode of every epoch. When the cached prompts exceed `max_tokens` together, the oldest
    are dropped."""

    def __init__(self, encode: Callable[[P], Sequence[int]], *, max_tokens: int = MAX_TOKENS) -> None:
        self._encode = encode
        self._max_tokens = max_tokens
        self._kept: dict[P, array[int]] = {}
        self._num_tokens = 0

    def token_ids(self, prompt: P) -> list[int]:
        """Return the prompt's ids as a new list."""
        kept = self._kept.get(prompt)
        if kept is None:
            kept = self._kept[prompt] = array("i", self._encode(prompt))
            self._num_tokens += len(kept)
            while self._num_tokens > self._max_tokens and len(self._kept) > 1:
                self._num_tokens -= len(self._kept.pop(next(iter(self._kept)), ()))
        return kept.tolist()
