"""Makes the events of samples: what is known of an episode, and its texts, shortened."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.observe.events import CONTEXT, SampleEvent, TurnText
from penstock.observe.plain_text import fair_share, without_middle, without_middles
from penstock.records import DEFAULT_POLICY, NOT_SAMPLED, Episode, Group, Score, Turn
from penstock.run.step_answers import PROCESS

KEPT_TEXT, KEPT_TRACED_TEXT = 4000, 400_000
"""Characters of a prompt or an answer that a sample keeps; more for the few whose tokens are reported."""
KEPT_TURNS, KEPT_TRACED_TURNS = 2000, 100_000
"""Tokens that it keeps of all turns together, where there are several."""
CHARACTERS_A_TOKEN = 4
MAX_TURNS = 64
DEFAULT_AGENT = "agent"

Decode = Callable[[list[int]], str]


def sample_event(
    group: Group,
    episode: Episode,
    score: Score | None,
    *,
    time: float,
    step: int | None,
    drop: str | None,
    advantage: float | None = None,
    policy: str = DEFAULT_POLICY,
    age_of: Callable[[int], int] | None = None,
    traced: bool = False,
    decode: Decode,
) -> SampleEvent:
    """Build the event of one episode. `policy` is the one whose versions and ages it reports; `decode` returns the
    text of tokens, with special tokens by name."""
    versions = sampled_versions((episode,), policy)
    oldest = min(versions, default=None)
    kept = KEPT_TRACED_TEXT if traced else KEPT_TEXT
    prompt = group.task.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message.role}: {message.content}" for message in prompt)
    return SampleEvent(
        process=PROCESS,
        time=time,
        group=group.number,
        episode=episode.index,
        task_id=group.task.id,
        step=step,
        drop=drop,
        failure=episode.failure,
        message=without_middle(episode.message, KEPT_TEXT),
        reward=None if score is None else score.value,
        parts={} if score is None else score.parts,
        advantage=advantage,
        oldest_version=oldest,
        newest_version=max(versions, default=None),
        num_turns=len(episode.turns),
        num_prompt_tokens=len(episode.turns[0].prompt_ids) if episode.turns else 0,
        num_output_tokens=episode.num_output_tokens,
        finish_reason=episode.turns[-1].finish_reason if episode.turns else "",
        prompt=without_middle(prompt, kept),
        answer=without_middle(episode.text, kept),
        age=None if age_of is None or oldest is None else age_of(oldest),
        traced=traced,
        turns=turn_texts(episode.turns, decode, KEPT_TRACED_TURNS if traced else KEPT_TURNS),
        extra={} if score is None else score.extra,
    )


def turn_texts(turns: Sequence[Turn], decode: Decode, num_tokens: int) -> tuple[TurnText, ...]:
    """Return what was read and sampled in each turn, where there are several. A turn that continues an earlier one
    shows only the new part of its context. At most `num_tokens` are decoded, since the controller waits for it:
    the longest texts lose their middles, and an episode of very many turns loses those in the middle."""
    if len(turns) < 2:
        return ()
    numbers = {turn.id: number for number, turn in enumerate(turns)}
    texts, token_ids = [], []
    for number, turn in chain(*_ends(tuple(enumerate(turns)), MAX_TURNS)):
        after = None if turn.parent is None else numbers.get(turn.parent)
        read = turns[after].token_ids if after is not None else turn.prompt_ids[:0]
        if not np.array_equal(turn.prompt_ids[: len(read)], read):
            after, read = None, turn.prompt_ids[:0]
        texts.append(TurnText(turn=number, role=CONTEXT, text="", after=after))
        texts.append(TurnText(turn=number, role=_role(turn), text=""))
        token_ids += [turn.prompt_ids[len(read) :].tolist(), turn.output_ids.tolist()]
    share = fair_share([len(ids) for ids in token_ids], num_tokens)
    decoded = [" […] ".join(decode(part) for part in _ends(ids, share)) for ids in token_ids]
    shortened = without_middles(decoded, num_tokens * CHARACTERS_A_TOKEN)
    return tuple(msgspec.structs.replace(one, text=text) for one, text in zip(texts, shortened, strict=True))


def _role(turn: Turn) -> str:
    """Return the agent that sampled a turn, or its policy, or `model` where both are the default."""
    if turn.agent != DEFAULT_AGENT:
        return turn.agent
    return "model" if turn.policy == DEFAULT_POLICY else turn.policy


S = TypeVar("S", bound=Sequence[Any])


def _ends(items: S, limit: int) -> tuple[S, ...]:
    """Return the items as one part, or the first and the last of them where they are more than `limit`."""
    if len(items) <= limit:
        return (items,)
    tail = limit // 4
    return items[: limit - tail], items[len(items) - tail :]  # type: ignore[return-value]


def sampled_versions(episodes: Sequence[Episode], policy: str) -> tuple[int, ...]:
    """Return the oldest and the newest version of every turn of this policy. Within a turn they only grow."""
    arrays = [turn.versions for episode in episodes for turn in episode.turns if turn.policy == policy]
    ends = [int(versions[end]) for versions in arrays if versions.size for end in (0, -1)]
    return tuple(version for version in ends if version != NOT_SAMPLED)
