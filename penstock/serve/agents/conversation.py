"""Turns the messages of a call into token ids that continue an earlier turn exactly.

A client sends the whole conversation each time. The context and the output of an earlier turn are recognised in it,
and only what follows is tokenised. So contexts grow in token ids, and sampled text is never tokenised again.

    messages  [system, user, answer 1, tool]
    tokens    [ as turn 1 saw and sampled  ][ what the template writes after an answer ]

Two things break this. A client may change earlier messages. And a template may render an earlier answer differently
from how it was sampled (many drop the reasoning of all answers but the last). Then the call opens a branch: the
whole conversation is tokenised, and earlier answers in it are context. `PromptHistory` does the same for prompts of
text; prompts of token ids are used as they are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from penstock.records import IntArray, Turn
from penstock.records.interfaces import Tokenizer
from penstock.serve.chat_messages import parsed_arguments

Kind = Literal["first", "continued", "forked", "separate", "client", "template"]
"""How a call relates to earlier ones: `first` of the episode; `continued`: after a turn; `forked`: after a
turn that another call has continued, or the same messages again; `separate`: a conversation about something
else; or its history was rewritten, by `client` or `template`."""
REWRITTEN: tuple[Kind, ...] = ("client", "template")
END = "\u2402end of answer\u2403"
"""Marks where a template puts the end of an answer."""
MIN_QUOTED_TOKENS = 8
"""An answer of at least this many tokens does not occur in another prompt by chance."""


class ChatRenderer(Protocol):
    """Covers the part of a tokenizer that a conversation needs."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Describes a call: its prompt in token ids, and how it relates to earlier turns."""

    token_ids: list[int]
    kind: Kind
    words: tuple[str, ...]
    """Its messages, each in canonical form."""
    setting: str
    """Its tools and template options. A call with other ones belongs to another conversation."""
    rendered: str
    parent: "Spoken | None" = None


@dataclass(slots=True, kw_only=True)
class Spoken:
    """Pairs a turn with the call that it answers."""

    heard: Heard
    turn: Turn
    words: tuple[str, ...]
    """The call's messages and the answer in canonical form, to recognise them when a client sends them back."""
    is_continued: bool = False


class Conversation:
    """Records the calls and turns of one episode."""

    def __init__(self, tokenizer: ChatRenderer) -> None:
        self._tokenizer = tokenizer
        self._spoken: list[Spoken] = []

    def hear(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Heard:
        """Return the tokens of a call, and how it relates to earlier ones. `messages` are in the form that a
        template takes."""
        options = dict(template_args or {})
        words = tuple(canonical(message) for message in messages)
        setting = json.dumps([tools, options], sort_keys=True)
        rendered = self._tokenizer.render_chat(messages, tools, **options)

        def heard(token_ids: list[int], kind: Kind, parent: Spoken | None = None) -> Heard:
            return Heard(
                token_ids=token_ids, kind=kind, words=words, setting=setting, rendered=rendered, parent=parent
            )

        for spoken in self._spoken:
            if spoken.heard.setting == setting and spoken.heard.words == words:
                return heard(spoken.turn.prompt_ids.tolist(), "forked")
        earlier = self._longest(words, setting)
        added = None if earlier is None else self._after(earlier, messages, tools, options)
        if earlier is None:
            return heard(self._tokenizer.encode(rendered), self._kind_of_new(words))
        if added is None:
            return heard(self._tokenizer.encode(rendered), "template")
        return heard([*earlier.turn.token_ids.tolist(), *added], self._kind_after(earlier, messages), earlier)

    def speak(self, heard: Heard, turn: Turn, answer: Mapping[str, Any]) -> None:
        """Record the turn that answers a call; `answer` is the message that the client is sent."""
        if heard.parent is not None:
            heard.parent.is_continued = True
        self._spoken.append(Spoken(heard=heard, turn=turn, words=(*heard.words, canonical(answer))))

    def _longest(self, words: tuple[str, ...], setting: str) -> Spoken | None:
        """Return the turn whose messages and answer are the longest prefix of `words`; of several, the latest."""
        found = [
            spoken
            for spoken in reversed(self._spoken)
            if spoken.heard.setting == setting
            and len(spoken.words) < len(words)
            and words[: len(spoken.words)] == spoken.words
        ]
        return max(found, key=lambda spoken: len(spoken.words), default=None)

    def _after(
        self,
        earlier: Spoken,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int] | None:
        """Return the tokens that the template writes after the answer of `earlier`. Return None if it now
        renders that answer, or the messages before it, differently."""
        at = len(earlier.words) - 1
        marked = [
            *messages[:at],
            {"role": "assistant", "content": earlier.turn.text + END},
            *messages[at + 1 :],
        ]
        text = self._tokenizer.render_chat(marked, tools, **options)
        before = earlier.heard.rendered
        answer, found, following = text[len(before) :].partition(END)
        if not text.startswith(before) or not found or squashed(answer) != squashed(earlier.turn.text):
            return None
        added = self._tokenizer.encode(following)
        return _unclosed(self._tokenizer, earlier.turn, added)

    def _kind_of_new(self, words: tuple[str, ...]) -> Kind:
        if not self._spoken:
            return "first"
        begun = {_opening(spoken.words) for spoken in self._spoken}
        return "client" if _opening(words) in begun else "separate"

    def _kind_after(self, earlier: Spoken, messages: Sequence[dict[str, Any]]) -> Kind:
        if not earlier.is_continued:
            return "continued"
        others = [message for message in messages[len(earlier.words) :] if message["role"] == "assistant"]
        return "client" if others else "forked"


def _unclosed(tokenizer: ChatRenderer | Tokenizer, turn: Turn, added: list[int]) -> list[int]:
    """Drop the end token from `added` if the turn has sampled it: an answer that ended by itself includes it."""
    last = int(turn.output_ids[-1]) if len(turn.output_ids) else None
    is_closed = last in tokenizer.stop_token_ids and added[:1] == [last]
    return added[1:] if is_closed else added


def canonical(message: Mapping[str, Any]) -> str:
    """Return a message as text that is equal for a client's copy of it. White space at the ends, ids of tool
    calls and the formatting of their arguments do not count; a tool message's `tool_call_id` does."""
    calls = [
        [call["function"]["name"], parsed_arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    content = (message.get("content") or "").strip()
    return json.dumps(
        [message["role"], content, calls, message.get("name"), message.get("tool_call_id")], sort_keys=True
    )


def squashed(text: str) -> str:
    """Remove white space, which templates trim and add."""
    return "".join(text.split())


def _opening(words: Sequence[str]) -> str:
    """Return the first user message, which tells what a conversation is about."""
    return next((word for word in words if word.startswith('["user"')), "")


class PromptHistory:
    """Recognises prompts that continue a turn; of a text, only what follows the turn is then tokenised. A prompt
    that repeats a turn's context or output without continuing it has a rewritten history. `turns` are passed
    with every call, since turns that were sent to no client do not count."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, str] = {}

    def remember(self, turn: Turn, prompt: str) -> None:
        """Keep the text that this turn answers: decoding its tokens would not give it back, since special tokens
        have no text."""
        self._texts[turn.id] = prompt

    def after_text(self, turns: Sequence[Turn], prompt: str) -> tuple[list[int], bool]:
        """Return the tokens of a prompt, and whether its history was rewritten. A prompt that begins with the
        context and output of a turn continues the turn's tokens."""
        known = sorted(
            ((self._text_of(turn), turn) for turn in turns), key=lambda pair: -len(pair[1].token_ids)
        )
        for seen, turn in known:
            if turn.text and prompt.startswith(seen + turn.text):
                added = self._tokenizer.encode(prompt[len(seen) + len(turn.text) :])
                return [*turn.token_ids.tolist(), *_unclosed(self._tokenizer, turn, added)], False
        for seen, turn in known:
            if prompt == seen:
                return turn.prompt_ids.tolist(), False
        is_rewritten = any(
            prompt.startswith(seen) or (len(turn.output_ids) >= MIN_QUOTED_TOKENS and turn.text in prompt)
            for seen, turn in known
            if seen and turn.text
        )
        return self._tokenizer.encode_prompt(prompt), is_rewritten

    def is_rewritten(self, turns: Sequence[Turn], token_ids: Sequence[int]) -> bool:
        """Return whether the tokens begin with a turn's context, or contain its output, without continuing any
        turn."""
        prompt = np.asarray(token_ids, dtype=np.int32)
        if any(_begins(prompt, turn.token_ids) or np.array_equal(prompt, turn.prompt_ids) for turn in turns):
            return False
        return any(_begins(prompt, turn.prompt_ids) or self._is_quoted(turn, prompt) for turn in turns)

    def _text_of(self, turn: Turn) -> str:
        text = self._texts.get(turn.id)
        return self._tokenizer.decode(turn.prompt_ids.tolist()) if text is None else text

    def _is_quoted(self, turn: Turn, prompt: IntArray) -> bool:
        """Return whether the prompt contains the turn's output, apart from its stop token: clients write their
        own. Outputs shorter than `MIN_QUOTED_TOKENS` do not count."""
        said = turn.output_ids
        if len(said) and int(said[-1]) in self._tokenizer.stop_token_ids:
            said = said[:-1]
        return len(said) >= MIN_QUOTED_TOKENS and _contains(prompt, said)


def _begins(whole: IntArray, part: IntArray) -> bool:
    return bool(len(part)) and len(part) <= len(whole) and np.array_equal(whole[: len(part)], part)


def _contains(whole: IntArray, part: IntArray) -> bool:
    """Return whether `whole` contains `part`. Searching bytes is fast; matches that start in the middle of a
    number are skipped."""
    where, what = whole.astype(np.int32).tobytes(), part.astype(np.int32).tobytes()
    at = where.find(what)
    while at >= 0 and at % 4:
        at = where.find(what, at + 1)
    return at >= 0
