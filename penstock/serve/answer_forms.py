"""Formats answers as OpenAI's chat and completions or as vLLM's token ids, whole or as events of a stream.

    pieces of choices ─► form ─► one body, or an event for each piece

One form writes the answer of one request. It does not matter to the form whether an engine or the turns of an
episode produce the pieces.
"""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from penstock.records import FinishReason, IntArray, MaskRef
from penstock.records.sampling_masks import fetch_mask
from penstock.serve.request_bodies import Body, ChatBody, CompletionBody, TextFields, TokenBody
from penstock.serve.served_model import ServedModel
from penstock.serve.tool_calls import ToolCall, ToolParser, parser_of

FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""Our finish reasons and what OpenAI and vLLM call them."""


@dataclass(slots=True)
class Piece:
    """Holds the next part of a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    sampling_mask: MaskRef | None = None
    prompt_ids: IntArray | None = None
    """The prompt of the choice; always set in its last piece."""
    all_versions: list[int] = field(default_factory=list)
    """In the last piece: the versions of all tokens of the choice."""

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_prompt(self) -> int:
        return 0 if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def reason(self) -> str | None:
        return None if self.finish_reason is None else FINISH[self.finish_reason]


class Form(Protocol):
    """Writes the answer of one request."""

    num_choices: int

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the body of a whole answer with these choices."""

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return the event that precedes the first piece of a choice, if there is one."""

    def event(self, number: int, piece: Piece) -> dict[str, Any]: ...

    def closing(self) -> dict[str, Any] | None:
        """Return the event that follows the last piece of all choices, if there is one."""


class TextForm:
    """Implements what completions and chat have in common."""

    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, body: TextFields, num_prompts: int = 1) -> None:
        self._tokenizer = model.tokenizer
        self._fields = body
        self._per_prompt = body.num_choices()
        self.num_choices = num_prompts * self._per_prompt
        name, now = body.model or model.name, int(time.time())
        self._frame = {"id": model.new_id(self.prefix), "created": now, "model": name}
        self._num_given = self._num_made = 0

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [self._whole_choice(number, piece) for number, piece in enumerate(pieces)]
        given = sum(piece.num_prompt for piece in pieces[:: self._per_prompt])
        made = sum(len(piece.token_ids) for piece in pieces)
        return self._frame | {"object": self.kind, "choices": choices, "usage": _usage(given, made)}

    def opening(self, number: int) -> dict[str, Any] | None:
        return None

    def event(self, number: int, piece: Piece) -> dict[str, Any]:
        self._num_made += len(piece.token_ids)
        if piece.is_last and number % self._per_prompt == 0:  # each prompt counts once, as OpenAI counts
            self._num_given += piece.num_prompt
        return self._event([self._delta(number, piece)])

    def closing(self) -> dict[str, Any] | None:
        if not self._fields.sends_usage:
            return None
        return self._event([]) | {"usage": _usage(self._num_given, self._num_made)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._frame | {"object": self.event_kind, "choices": choices}

    def _token_fields(self, piece: Piece) -> dict[str, Any]:
        wanted = self._fields.return_token_ids
        return {"token_ids": piece.token_ids, "versions": piece.versions} if wanted else {}

    def _prompt(self, piece: Piece) -> dict[str, Any]:
        if piece.prompt_ids is None or not self._fields.return_token_ids:
            return {}
        return {"prompt_token_ids": piece.prompt_ids.tolist()}

    def _whole_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, number: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(TextForm):
    """Writes answers of `/v1/completions`."""

    def __init__(self, model: ServedModel, body: CompletionBody) -> None:
        super().__init__(model, body, len(body.prompts()))
        self._has_logprobs = body.logprobs is not None
        self._offsets = [0] * self.num_choices

    def _whole_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        return self._choice(number, piece, 0)

    def _delta(self, number: int, piece: Piece) -> dict[str, Any]:
        choice = self._choice(number, piece, self._offsets[number])
        if choice["logprobs"] is not None:
            self._offsets[number] += sum(map(len, choice["logprobs"]["tokens"]))
        return choice

    def _choice(self, number: int, piece: Piece, offset: int) -> dict[str, Any]:
        """Return a choice. `offset` is where its piece starts in the answer, in characters of the decoded
        tokens."""
        logprobs = self._logprobs(piece, offset) if self._has_logprobs else None
        choice = {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.reason}
        return choice | self._token_fields(piece) | self._prompt(piece)

    def _logprobs(self, piece: Piece, offset: int) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token]) for token in piece.token_ids]
        return {
            "tokens": texts,
            "token_logprobs": piece.logprobs,
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }


class ChatForm(TextForm):
    """Writes answers of `/v1/chat/completions`. A stream holds text back for as long as it may be part of a tool
    call."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: ServedModel, body: ChatBody) -> None:
        super().__init__(model, body)
        self._has_logprobs = bool(body.logprobs)
        self._parser = parser_of(model.tokenizer.template) if body.shown_tools else None
        self._shown = [ShownText(self._parser) for _ in range(self.num_choices)]
        self._new_id = model.new_id

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return super().whole(pieces) | self._prompt(pieces[0])

    def opening(self, number: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": number, "delta": delta, "finish_reason": None}])

    def _whole_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        text, calls = (piece.text, []) if self._parser is None else self._parser.parse(piece.text)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in self._calls(calls)
            ]
        return {"index": number, "message": message} | self._rest(piece, calls)

    def _delta(self, number: int, piece: Piece) -> dict[str, Any]:
        text, calls = self._shown[number].push(piece.text, is_last=piece.is_last)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = self._calls(calls)
        prompt = self._prompt(piece) if piece.is_last else {}
        return {"index": number, "delta": delta} | self._rest(piece, calls) | prompt

    def _rest(self, piece: Piece, calls: list[ToolCall]) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(piece) if self._has_logprobs else None,
            "finish_reason": "tool_calls" if calls and piece.finish_reason == "stop" else piece.reason,
        } | self._token_fields(piece)

    def _calls(self, calls: list[ToolCall]) -> list[dict[str, Any]]:
        return [call.as_json(number, self._new_id("call")) for number, call in enumerate(calls)]

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "content": [
                {
                    "token": self._tokenizer.decode([token]),
                    "logprob": logprob,
                    "bytes": None,
                    "top_logprobs": [],
                }
                for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        }


class TokenForm:
    """Writes answers of `/inference/v1/generate`, vLLM's token-level API. `versions`, one per token in every
    event, is our addition: vLLM reports versions only when an answer has ended."""

    num_choices = 1

    def __init__(self, model: ServedModel, body: TokenBody) -> None:
        self._id = body.request_id or model.new_id("generate")
        self._blobs = model.blobs

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        (piece,) = pieces
        return self.event(0, piece) | {"usage": _usage(piece.num_prompt, len(piece.token_ids))}

    def opening(self, number: int) -> None:
        return None

    def event(self, number: int, piece: Piece) -> dict[str, Any]:
        logprobs = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": piece.token_ids,
            "logprobs": {"content": logprobs},
            "versions": piece.versions,
            "finish_reason": piece.reason,
        }
        if piece.is_last:
            choice["weight_versions"] = version_spans(piece.all_versions)
        if piece.sampling_mask is not None:
            assert self._blobs is not None, "what records masks has a store for them"
            mask = fetch_mask(self._blobs, piece.sampling_mask)
            choice["sampling_mask"] = {
                "counts": _base64(mask.counts),
                "words": _base64(mask.words),
                "vocab_size": mask.vocab_size,
            }
        return {"request_id": self._id, "choices": [choice]}

    def closing(self) -> None:
        return None


def form_of(model: ServedModel, body: Body) -> Form:
    if isinstance(body, ChatBody):
        return ChatForm(model, body)
    return CompletionForm(model, body) if isinstance(body, CompletionBody) else TokenForm(model, body)


class ShownText:
    """Holds back the text of a streamed answer for as long as it may be part of a tool call."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._text = ""
        self._sent = 0

    def push(self, piece: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        if self._parser is None:
            return piece, []
        self._text += piece
        text, calls = self._parser.parse(self._text) if is_last else (self._text, [])
        end = len(text) if is_last else self._parser.begins(self._text)
        shown = text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown, calls


def version_spans(versions: Sequence[int]) -> list[dict[str, object]]:
    """Return versions as vLLM does: spans of output tokens, counted from the beginning of the answer."""
    spans: list[dict[str, object]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": str(version), "start": at, "end": at + 1})
    return spans


def _usage(given: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _base64(numbers: IntArray) -> str:
    """Encode numbers as little-endian 32-bit integers."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<i4").tobytes()).decode()


class StopTexts:
    """Cuts a text before its first stop string, as OpenAI's clients expect. An engine samples whole tokens, so
    the token that completes a stop string is part of its answer. Text that may begin a stop string is held
    back until that is certain."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._has_ended = False

    def push(self, piece: str, *, is_last: bool = False) -> str:
        """Add a piece, and return as much of the text as is certain."""
        if self._has_ended:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._has_ended = True
            return text[: min(found)]
        hold = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
