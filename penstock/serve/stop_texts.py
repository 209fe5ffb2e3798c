"""Where a text ends that must not contain any of some stop strings, found while the text still comes."""

from collections.abc import Sequence


class StopTexts:
    """An engine samples whole tokens, so the token that completes a stop string is part of its answer. OpenAI's
    clients expect a text without it. What may be the beginning of a stop string is held back until it is known."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._has_ended = False

    def push(self, piece: str, *, is_last: bool = False) -> str:
        """As much of the text as is certain."""
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
    """How many characters at the end of the text may be the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
