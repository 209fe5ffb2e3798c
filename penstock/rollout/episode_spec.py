"""Which episode to run, as data: it may be run in this process or travel to another."""

import re
import zlib

import msgspec
import numpy as np

from penstock.errors import UserError
from penstock.records import CallAnswer, Record, SamplingParams, Task, Turn

TRAINING, EVALUATION = "g", "e"
_TURN_ID = re.compile(TRAINING + r"(\d+)\.(\d+)\.(\d+)")


class EpisodeSpec(Record, frozen=True, kw_only=True):
    """Attempt `index` at the task of group `group`. Its name, its seeds and its request ids follow from these
    numbers alone, so that an episode that is run again after a restart asks for the same turns."""

    group: int
    index: int
    task: Task
    sampling: SamplingParams
    """Of its turns. With a seed, which is then the run's, every turn gets one of its own."""
    label: str = TRAINING
    """Tells the episodes of training and evaluation apart."""
    chunk_tokens: int = 32
    timeout_s: float = 1800.0
    max_turns: int = 0
    """Its most turns; 0 is no limit."""
    max_tokens: int = 0
    """The most tokens that it may sample; 0 is no limit."""
    calls: tuple[CallAnswer, ...] = ()
    """What calls through the rollout gave before a restart, or at an earlier try."""
    turns: tuple[Turn, ...] = ()
    """Those that were finished at an earlier try: they are given again, where the same is asked for."""

    @property
    def name(self) -> str:
        return f"{self.label}{self.group}.{self.index}"

    @property
    def is_evaluation(self) -> bool:
        return self.label == EVALUATION

    def turn_id(self, turn: int) -> str:
        """The request id of a turn: `g12.3.0` is the first turn of episode 3 of group 12."""
        return f"{self.name}.{turn}"

    def turn_sampling(self, turn: int) -> SamplingParams:
        """The episode's settings with the turn's own seed, when the run has one."""
        seed = self.sampling.seed
        if seed is None:
            return self.sampling
        words = (seed, zlib.crc32(self.label.encode()), self.group % 2**32, self.index, turn)
        small = np.array(words, dtype=np.uint32) if seed < 2**32 else words  # mixed alike, in half the time
        return msgspec.structs.replace(
            self.sampling, seed=int(np.random.SeedSequence(small).generate_state(1)[0])
        )


def place_of(request_id: str) -> tuple[int, int, int] | None:
    """Group, episode and turn of a training request; None for others."""
    found = _TURN_ID.fullmatch(request_id)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def check_replayed(sampling: SamplingParams) -> None:
    """Refuse what would make the recorded logprobs those of another distribution than the trainer's."""
    settings = sampling.not_replayed()
    if settings:
        raise UserError(
            f"rollouts that are trained on can't be sampled with {', '.join(settings)}: the trainer can't replay "
            "it, so every ratio would be wrong; unset it, or use it in evaluation only"
        )
