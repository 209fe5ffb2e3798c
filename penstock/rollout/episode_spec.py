"""Describes an episode as data, so that it can run in this process or in another."""

import re
import zlib

import msgspec
import numpy as np

from penstock.errors import UserError
from penstock.records import CallAnswer, Record, SamplingParams, Task, Turn

TRAINING, EVALUATION = "g", "e"
_TURN_ID = re.compile(TRAINING + r"(\d+)\.(\d+)\.(\d+)")


class EpisodeSpec(Record, frozen=True, kw_only=True):
    """Specifies attempt `index` at the task of group `group`. Its name, seeds and request ids follow from these
    numbers, `label` and the run's seed, so an episode that runs again after a restart asks for the same turns."""

    group: int
    index: int
    task: Task
    sampling: SamplingParams
    """The settings of its turns. If they have a seed, every turn gets its own seed derived from it."""
    label: str = TRAINING
    """Tells the episodes of training and evaluation apart."""
    chunk_tokens: int = 32
    timeout_s: float = 1800.0
    max_turns: int = 0
    """The most turns; 0 is no limit."""
    max_tokens: int = 0
    """The most tokens that the episode may sample; 0 is no limit."""
    calls: tuple[CallAnswer, ...] = ()
    """Results of calls through the rollout, from before a restart or from an earlier try."""
    turns: tuple[Turn, ...] = ()
    """Turns that an earlier try finished. They are replayed where the same is asked for."""

    @property
    def name(self) -> str:
        return f"{self.label}{self.group}.{self.index}"

    @property
    def is_evaluation(self) -> bool:
        return self.label == EVALUATION

    def turn_id(self, turn: int) -> str:
        """Return the request id of a turn: `g12.3.0` is the first turn of episode 3 of group 12."""
        return f"{self.name}.{turn}"

    def turn_sampling(self, turn: int) -> SamplingParams:
        """Return the episode's settings, with the turn's own seed if the run has one."""
        seed = self.sampling.seed
        if seed is None:
            return self.sampling
        words = (seed, zlib.crc32(self.label.encode()), self.group % 2**32, self.index, turn)
        small = np.array(words, dtype=np.uint32) if seed < 2**32 else words  # the same seed in half the time
        return msgspec.structs.replace(
            self.sampling, seed=int(np.random.SeedSequence(small).generate_state(1)[0])
        )


def place_of(request_id: str) -> tuple[int, int, int] | None:
    """Return the group, episode and turn of a training request, or None for other requests."""
    found = _TURN_ID.fullmatch(request_id)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def check_replayed(sampling: SamplingParams) -> None:
    """Refuse settings under which the recorded logprobs would be of another distribution than the trainer's."""
    settings = sampling.not_replayed()
    if settings:
        raise UserError(
            f"rollouts that are trained on can't be sampled with {', '.join(settings)}: the trainer can't replay "
            "it, so every ratio would be wrong; unset it, or use it in evaluation only"
        )
