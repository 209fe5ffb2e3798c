"""From the messages of a call to token ids that go on after what was sampled before.

A client sends the whole conversation each time. What an earlier turn saw and sampled is found again in it, and
only what comes after is tokenised: contexts grow in token ids, and nothing that was sampled is ever tokenised
again.

    messages  [system, user, answer 1, tool]
    tokens    [ as turn 1 saw and sampled  ][ what the template writes after an answer ]

Two things break this. A client may send other words than were said. And a template may write an earlier answer
differently from how it was sampled (many drop the reasoning of all answers but the last). Then the call opens a
branch: the whole conversation is tokenised, and earlier answers in it are context.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from penstock.serve.chat_messages import parsed_arguments
from penstock.types import Turn

Kind = Literal["first", "continued", "forked", "separate", "client", "template"]
"""How a call goes on: `first` of the episode; `continued`: after a turn; `forked`: after one that another call
went on from already; `separate`: a conversation about something else; or its history was rewritten, by `client`
or `template`."""
REWRITTEN: tuple[Kind, ...] = ("client", "template")
END = "\u2402end of answer\u2403"
"""Marks where a template puts the end of an answer."""


class ChatRenderer(Protocol):
    """What is needed of a tokenizer."""

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
    """A call, understood: the tokens that it comes to, and how it goes on from what was said before."""

    token_ids: list[int]
    kind: Kind
    words: tuple[str, ...]
    """Its messages, each in one form."""
    setting: str
    """Tools and options of the template: other ones make another conversation."""
    rendered: str
    parent: "Spoken | None" = None


@dataclass(slots=True, kw_only=True)
class Spoken:
    """A turn that was made, with the call that it answers."""

    heard: Heard
    turn: Turn
    words: tuple[str, ...]
    """The call's messages and the answer, as a client will send them back."""
    is_continued: bool = False


class Conversation:
    """What was said in one episode."""

    def __init__(self, tokenizer: ChatRenderer) -> None:
        self._tokenizer = tokenizer
        self._spoken: list[Spoken] = []

    def hear(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Heard:
        """`messages` are as a template takes them."""
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
        """`answer` is the message that the client is sent."""
        if heard.parent is not None:
            heard.parent.is_continued = True
        self._spoken.append(Spoken(heard=heard, turn=turn, words=(*heard.words, canonical(answer))))

    def _longest(self, words: tuple[str, ...], setting: str) -> Spoken | None:
        """The turn after which most of the messages come, answer included; of equals the last."""
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
        """What the template writes after the answer of `earlier`; None where it writes what came before differently
        from how it was."""
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
        last = int(earlier.turn.output_ids[-1]) if len(earlier.turn.output_ids) else None
        # An answer that ended by itself has written its own end already.
        is_closed = last in self._tokenizer.stop_token_ids and added[:1] == [last]
        return added[1:] if is_closed else added

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


def canonical(message: Mapping[str, Any]) -> str:
    """A message in a form in which a client's copy equals what it was sent: white space at the ends, ids of
    calls and the spelling of JSON do not count."""
    calls = [
        [call["function"]["name"], parsed_arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    content = (message.get("content") or "").strip()
    return json.dumps(
        [message["role"], content, calls, message.get("name"), message.get("tool_call_id")], sort_keys=True
    )


def squashed(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())


def _opening(words: Sequence[str]) -> str:
    """The first message of a user: what a conversation is about."""
    return next((word for word in words if word.startswith('["user"')), "")
