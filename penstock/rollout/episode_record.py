"""Records what one episode has done, and enforces its limits of turns and tokens."""

import difflib
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.records import SamplingParams, Turn
from penstock.records.scores import LARGEST_REWARD, fits_float32
from penstock.rollout.episode_spec import EpisodeSpec


class EpisodeLimit(PenstockError):
    """Raised when an episode has used up its turns or its tokens."""


@dataclass(slots=True)
class EpisodeRecord:
    """Holds what a rollout and its twin share; the twin may be used in another thread."""

    spec: EpisodeSpec
    num_begun: int = 0
    num_reserved: int = 0
    """Tokens of finished turns, plus the most that turns under way may sample."""
    turns: dict[int, Turn] = field(default_factory=dict)
    """The finished turns, by number."""
    rewrites: dict[str, int] = field(default_factory=dict)
    engine_error: Exception | None = None
    is_limited: bool = False
    """Whether the episode has asked for more turns or tokens than it may have."""
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_turn(self, sampling: Mapping[str, Any], *, trains: bool) -> tuple[int, SamplingParams]:
        """Return the number of the next turn, and its sampling settings within what the episode has left.
        `sampling` overrides the episode's settings; `trains`: the turn's tokens may be trained on. Raise
        `EpisodeLimit` if no turn or token is left."""
        spec = self.spec
        with self._lock:
            number = self.num_begun
            if spec.max_turns and number >= spec.max_turns:
                self.is_limited = True
                raise EpisodeLimit(f"the episode has had its {spec.max_turns} turns (rollout.max_turns)")
            settings = _overridden(spec.turn_sampling(number), sampling, trains=trains)
            if spec.max_tokens:
                left = spec.max_tokens - self.num_reserved
                if left < 1:
                    self.is_limited = True
                    raise EpisodeLimit(
                        f"the episode has sampled its {spec.max_tokens} tokens (rollout.max_episode_tokens)"
                    )
                settings = msgspec.structs.replace(settings, max_tokens=min(settings.max_tokens, left))
            self.num_begun += 1
            self.num_reserved += settings.max_tokens
        return number, settings

    def give_back(self, num_tokens: int) -> None:
        """Return tokens that were reserved for a turn and not sampled."""
        with self._lock:
            self.num_reserved -= num_tokens

    def in_order(self) -> tuple[Turn, ...]:
        """Return the finished turns in the order in which they were begun."""
        turns = dict(self.turns)
        return tuple(turns[number] for number in sorted(turns))

    def set_reward(self, value: float, parts: Mapping[str, float]) -> None:
        """Set the reward, which must be finite in float32. A later call replaces it."""
        numbers = {"reward": _float(value), **{name: _float(part) for name, part in parts.items()}}
        for name, number in numbers.items():
            if not fits_float32(number):
                raise ValueError(
                    f"a reward must be finite and within ±{LARGEST_REWARD:.2g}, got {number:g} for {name!r}"
                )
        self.reward, self.parts = numbers.pop("reward"), numbers


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int that no float can hold
        return math.inf


def turn_number(turn: Turn) -> int:
    """Return the number of a turn within its episode."""
    return int(turn.id.rpartition(".")[2])


def _overridden(settings: SamplingParams, changes: Mapping[str, Any], *, trains: bool) -> SamplingParams:
    known = SamplingParams.__struct_fields__
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they are: {', '.join(known)}"
            raise TypeError(f"generate has no sampling setting {name!r}; {hint}")
    if trains and settings.temperature > 0 and changes.get("temperature") == 0:
        raise ValueError(
            "temperature must be > 0, got 0: greedy tokens have no distribution to train on; 0 is for evaluation "
            "(eval.temperature) and for other policies"
        )
    return msgspec.structs.replace(settings, **changes) if changes else settings
