"""The token ids of prompts, kept for the next time: a run sees each of its prompts when it checks them, then in
every episode of every epoch."""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)

MAX_TOKENS = 1 << 21
"""Eight megabytes."""


class KeptPrompts(Generic[P]):
    """Encodes each prompt once while it is remembered. When they have more than `max_tokens` together, those that
    came first are forgotten."""

    def __init__(self, encode: Callable[[P], Sequence[int]], *, max_tokens: int = MAX_TOKENS) -> None:
        self._encode = encode
        self._max_tokens = max_tokens
        self._kept: dict[P, array[int]] = {}
        self._num_tokens = 0

    def token_ids(self, prompt: P) -> list[int]:
        """A list of the caller's own."""
        kept = self._kept.get(prompt)
        if kept is None:
            kept = self._kept[prompt] = array("i", self._encode(prompt))
            self._num_tokens += len(kept)
            while self._num_tokens > self._max_tokens and len(self._kept) > 1:
                self._num_tokens -= len(self._kept.pop(next(iter(self._kept)), ()))
        return kept.tolist()
