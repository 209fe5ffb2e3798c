"""Holds what a server answers from: an engine, its tokenizer, and the limits of both."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.models.tokenizer import ChatTokenizer
from penstock.records.interfaces import BlobStore
from penstock.rollout.episode_rollout import TokenSource
from penstock.serve.api_error import ApiError


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """Holds a model under the `name` that clients use. `window` is how many tokens the engine samples at a time."""

    name: str
    engine: TokenSource
    tokenizer: ChatTokenizer
    max_context: int
    window: int = 1
    max_requests: int = 4096
    """Generations that may run at once. Each buffers what its client has not read yet, so this bounds memory."""
    num_running: int = 0
    created: int = 0
    blobs: BlobStore | None = None
    """Where the engine stores recorded sampling masks."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def check_model(self, asked: str) -> None:
        """Refuse another model's name. A request without a name means this model."""
        if asked and asked != self.name:
            raise ApiError(
                f"the model {asked!r} does not exist; this server has {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def room(self, num_prompt: int, asked: int | None) -> int:
        """Return how many tokens fit after the prompt. Refuse a prompt that leaves no room for `asked` tokens,
        or for one if `asked` is None."""
        room = self.max_context - num_prompt
        if room < 1 or (asked is not None and asked > room):
            wanted = f" and {asked} for the answer" if asked is not None and room >= 1 else ""
            raise ApiError(
                f"this model's maximum context length is {self.max_context} tokens, got {num_prompt} in the "
                f"prompt{wanted}; shorten one of them",
                code="context_length_exceeded",
            )
        return room

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"

    @contextmanager
    def place(self, count: int = 1) -> Iterator[None]:
        """Reserve `count` generations, or answer 429 so that the client tries again later."""
        if self.num_running + count > self.max_requests:
            raise ApiError(
                f"{self.num_running} generations are running, {self.max_requests} is the limit; try again later",
                status=429,
                kind="rate_limit_error",
                code="server_overloaded",
            )
        self.num_running += count
        try:
            yield
        finally:
            self.num_running -= count

    def card(self) -> dict[str, Any]:
        """Return the model's entry in `/v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "penstock",
            "max_model_len": self.max_context,
        }
