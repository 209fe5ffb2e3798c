"""Turns, groups and scores for tests that write down only what they are about."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.records import (
    BlobRef,
    Chunk,
    Episode,
    FinishReason,
    Group,
    MaskRef,
    Sample,
    SamplingMask,
    SamplingParams,
    Score,
    ScoredGroup,
    Task,
    Turn,
)
from penstock.records.sampling_masks import kept_ids


def make_turn(
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    logprobs: float | Sequence[float] = 0.0,
    versions: int | Sequence[int] = 0,
    finish_reason: FinishReason = "stop",
    sampling: SamplingParams | None = None,
    text: str = "",
    **fields: Any,
) -> Turn:
    """A turn of these tokens; one logprob or version stands for all of them."""
    return Turn(
        prompt_ids=np.array(prompt, dtype=np.int32),
        output_ids=np.array(output, dtype=np.int32),
        logprobs=np.full(len(output), logprobs, dtype=np.float32),
        versions=np.full(len(output), versions, dtype=np.int32),
        finish_reason=finish_reason,
        sampling=sampling or SamplingParams(),
        text=text,
        **fields,
    )


def make_chunk(
    tokens: Sequence[int],
    *,
    logprobs: float | Sequence[float] = 0.0,
    versions: int | Sequence[int] = 0,
    **fields: Any,
) -> Chunk:
    """A piece of an answer; one logprob or version stands for all of its tokens."""
    return Chunk(
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), logprobs, dtype=np.float32),
        versions=np.full(len(tokens), versions, dtype=np.int32),
        **fields,
    )


def make_sample(
    tokens: Sequence[int],
    in_loss: bool | Sequence[bool],
    *,
    logprobs: float | Sequence[float] = 0.0,
    versions: int | Sequence[int] = 0,
    **fields: Any,
) -> Sample:
    """A sample of these tokens; one value stands for all of them."""
    return Sample(
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=np.full(len(tokens), in_loss, dtype=np.bool_),
        logprobs=np.full(len(tokens), logprobs, dtype=np.float32),
        versions=np.full(len(tokens), versions, dtype=np.int32),
        **{"sampling": SamplingParams(), **fields},
    )


def scored_episodes(
    episodes: Sequence[Sequence[Turn]],
    scores: Sequence[Score | float],
    *,
    number: int = 0,
    task_id: str = "t",
    failures: tuple[Episode, ...] = (),
) -> ScoredGroup:
    """A group of episodes, each given by its turns, with their scores."""
    group = Group(
        number=number,
        task=Task(id=task_id, prompt="p"),
        episodes=tuple(
            Episode(task_id=task_id, turns=tuple(turns), index=index) for index, turns in enumerate(episodes)
        ),
        failures=failures,
    )
    values = (score if isinstance(score, Score) else Score(value=score) for score in scores)
    return ScoredGroup(group=group, scores=tuple(values))


def scored(number: int, versions: Sequence[int]) -> ScoredGroup:
    """A group of one episode, whose tokens were sampled with these versions."""
    turn = make_turn([1, 2], range(len(versions)), versions=versions)
    return scored_episodes([[turn]], [1.0], number=number, task_id=f"t{number}")


def with_turns(scored: ScoredGroup, change: Callable[[Turn], Turn]) -> ScoredGroup:
    """The same group, every turn of its episodes changed."""
    episodes = tuple(
        msgspec.structs.replace(episode, turns=tuple(map(change, episode.turns)))
        for episode in scored.group.episodes
    )
    return msgspec.structs.replace(scored, group=msgspec.structs.replace(scored.group, episodes=episodes))


def with_blob(scored: ScoredGroup, ref: BlobRef) -> ScoredGroup:
    """The same group, its turns of two tokens with their sampling mask in a blob."""
    mask = MaskRef(start=0, num_tokens=2, vocab_size=9, blob=ref)
    return with_turns(scored, lambda turn: msgspec.structs.replace(turn, sampling_masks=(mask,)))


def kept_rows(mask: SamplingMask, tokens: Sequence[int] | None = None) -> list[list[int]]:
    """The kept ids of some tokens of a mask, or of all."""
    wanted = range(len(mask.counts)) if tokens is None else tokens
    counts, ids = kept_ids(mask, np.array(wanted, dtype=np.int64))
    assert ids.dtype == np.int32
    return [row.tolist() for row in np.split(ids, np.cumsum(counts)[:-1])]
