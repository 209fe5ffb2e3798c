"""Translates requests into vLLM's token-level HTTP API, and its stream of events back. Nothing here does I/O."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineLost, PenstockError
from penstock.records import GenerateRequest

SEEDS = 2**63
"""vLLM's seeds must be below this."""


@dataclass(frozen=True, slots=True)
class Span:
    """Says that output tokens `start` to `end` were sampled with the weights of `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Holds the content of one message of the stream."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    spans: tuple[Span, ...] = ()
    """Versions of the whole output; only the last message has them."""
    routes: str | None = None
    """The experts of all tokens, as `routed_experts.py` reads them; only the last message has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Describes one call of `/inference/v1/generate`: a request, or the rest of one that has tokens already."""

    request: GenerateRequest
    generated: Sequence[int] = ()
    max_context: int
    salt: str
    """Equal prefixes share KV only under the same salt, so each version has its own."""
    adapter: str = ""
    """The name of the adapter that the request runs with."""
    routing_start: int = 0
    """Experts of tokens before this one are not sent. Servers that do not return experts ignore it."""

    @property
    def num_done(self) -> int:
        """Return how many output tokens exist already."""
        return self.request.num_resumed + len(self.generated)

    @property
    def max_tokens(self) -> int:
        request = self.request
        return min(request.sampling.max_tokens, self.max_context - request.num_prompt) - self.num_done

    def body(self) -> dict[str, Any]:
        request = self.request
        body: dict[str, Any] = {
            "token_ids": [*request.token_ids.tolist(), *self.generated],
            "sampling_params": self._sampling(),
            "cache_salt": self.salt,
            "priority": request.priority,
            "stream": True,
        }
        return body | ({"model": self.adapter} if self.adapter else {})

    def _sampling(self) -> dict[str, Any]:
        """Return all sampling parameters, because a server fills gaps with what the model's folder suggests."""
        sampling, done = self.request.sampling, self.num_done
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": max(0, min(sampling.min_tokens, sampling.max_tokens) - done),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            # The rest of an answer must not be sampled with the same noise as its beginning.
            "seed": None if sampling.seed is None else (sampling.seed + done) % SEEDS,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
            "routed_experts_prompt_start": self.routing_start,
        }


def parse_event(line: bytes) -> Event | None:
    """Parse a line of the stream; return None for empty lines and the end mark. Raise the error that ended it."""
    text = line.strip()
    if not text.startswith(b"data:"):
        return None
    data = text.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return None
    message = json.loads(data)
    if "error" in message:
        raise _error_of(message["error"])
    if not message.get("choices"):
        return None
    (choice,) = message["choices"]
    token_ids = tuple(choice.get("token_ids") or ())
    content = (choice.get("logprobs") or {}).get("content") or ()
    logprobs = tuple(float(each["logprob"]) for each in content)
    if len(logprobs) != len(token_ids):
        raise PenstockError(f"vLLM sent {len(token_ids)} tokens with {len(logprobs)} logprobs")
    spans = tuple(
        Span(str(each["version"]), int(each["start"]), int(each["end"]))
        for each in choice.get("weight_versions") or ()
    )
    return Event(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=choice.get("finish_reason"),
        spans=spans,
        routes=choice.get("routed_experts"),
    )


def _error_of(error: Any) -> PenstockError:
    """Return the error that ended a stream: `EngineLost` if the server broke, `PenstockError` if it can't serve
    the request."""
    said = error if isinstance(error, dict) else {"message": str(error)}
    kind = PenstockError if int(said.get("code") or 500) < 500 else EngineLost
    return kind(f"vLLM says: {said.get('message', said)}")


def versions_of(spans: Sequence[Span], num_tokens: int, *, fallback: int) -> list[int]:
    """Return the version of each token. Tokens without a known version get `fallback`, as on a server that was
    never given a version."""
    versions = [fallback] * num_tokens
    for span in spans:
        known = int(span.version) if span.version.lstrip("-").isdigit() else fallback
        versions[span.start : span.end] = [known] * (min(span.end, num_tokens) - span.start)
    return versions
