"""Group selection decides what happens to a scored group before it is buffered.

A selection may drop the whole group (the task is then replaced), change its scores, or keep some of its
episodes out of the loss. It never splits a group: the scores of masked episodes still count in the baseline.
Everything here is pure and imports without torch, for the controller.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.algorithms.ranges import Fraction, NotNegative, Positive
from penstock.algorithms.registry import Registry
from penstock.records import Episode, Sample, ScoredGroup


class Selected(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Holds a group after selection. `keep[i]` says whether episode i is in the loss. `drop` is the reason why
    the whole group is dropped, None if it is not."""

    scored: ScoredGroup
    keep: tuple[bool, ...]
    drop: str | None = None

    def samples(self, episode: int) -> tuple[Sample, ...]:
        """Return an episode's samples, masked out of the loss if the episode was not kept."""
        samples = self.scored.samples(episode)
        return samples if self.keep[episode] else tuple(_masked(sample) for sample in samples)


def _checked(selected: Any, scored: ScoredGroup) -> Selected:
    """Accept `Selected` from a user's selection, or one bool per episode that says whether it is in the loss."""
    size = len(scored.scores)
    if isinstance(selected, Sequence | np.ndarray) and not isinstance(selected, str):
        selected = Selected(scored=scored, keep=tuple(map(bool, selected)))
    if not isinstance(selected, Selected):
        raise ValueError(
            f"Selected, or a bool for each of its {size} episodes; got {type(selected).__name__}"
        )
    if len(selected.keep) != size or len(selected.scored.scores) != size:
        raise ValueError(f"as many values as the group has episodes, {size}; got {len(selected.keep)}")
    return selected


SELECTIONS: Registry[Callable[..., Selected]] = Registry("selection", takes=("scored",), check=_checked)


def select(scored: ScoredGroup, selections: Mapping[str, Mapping[str, Any]]) -> Selected:
    """Apply selections in order, up to the first that drops the group or leaves no episode of it. An episode stays
    if every one keeps it."""
    keep = (True,) * len(scored.scores)
    for name, arguments in selections.items():
        selected = SELECTIONS.bind(name, arguments)(scored)
        scored = selected.scored
        keep = tuple(one and other for one, other in zip(keep, selected.keep, strict=True))
        if selected.drop is not None:
            return Selected(scored=scored, keep=keep, drop=selected.drop)
        if not any(keep):
            return Selected(scored=scored, keep=keep, drop=name)
    return Selected(scored=scored, keep=keep)


@SELECTIONS.register("zero_variance")
def zero_variance(scored: ScoredGroup, *, tolerance: NotNegative = 0.0) -> Selected:
    """Drops groups whose episodes all score the same, to be replaced by others (dynamic sampling).

    A group is dropped when max(r) − min(r) ≤ tolerance: it has no gradient under any group baseline. Source:
    Yu et al. 2025, DAPO (arXiv:2503.14476), section 3.2.
    """
    values = scored.values
    same = not values.size or float(values.max()) - float(values.min()) <= tolerance
    return Selected(scored=scored, keep=_all(scored), drop="zero_variance" if same else None)


@SELECTIONS.register("overlong_filter")
def overlong_filter(scored: ScoredGroup) -> Selected:
    """Keeps episodes that ran into the token limit out of the loss, because their score says little.

    An episode is masked when its last turn finished by length. Source: Yu et al. 2025, DAPO
    (arXiv:2503.14476), section 3.4.
    """
    keep = tuple(not _is_truncated(episode) for episode in scored.group.episodes)
    return Selected(scored=scored, keep=keep)


@SELECTIONS.register("overlong_penalty", ordered=("margin", "max_length"))
def overlong_penalty(
    scored: ScoredGroup, *, max_length: Positive = 20480, margin: Positive = 4096
) -> Selected:
    """Lowers the score linearly over the last tokens before the limit (soft overlong punishment).

    With l sampled tokens: 0 up to max_length − margin, then ((max_length − margin) − l)/margin, −1 past
    max_length. The penalty is added to the score and recorded as its part `overlong_penalty`. Source: Yu et
    al. 2025, DAPO (arXiv:2503.14476), section 3.4: 16,384 expected tokens and a margin of 4,096.
    """
    scores = []
    for episode, score in zip(scored.group.episodes, scored.scores, strict=True):
        over = episode.num_output_tokens - (max_length - margin)
        penalty = -min(1.0, max(0.0, over / margin))
        parts = {**score.parts, "overlong_penalty": penalty}
        scores.append(msgspec.structs.replace(score, value=score.value + penalty, parts=parts))
    changed = msgspec.structs.replace(scored, scores=tuple(scores))
    return Selected(scored=changed, keep=_all(scored))


@SELECTIONS.register("asymmetric")
def asymmetric(scored: ScoredGroup, *, negative_fraction: Fraction = 0.25, seed: NotNegative = 0) -> Selected:
    """Keeps every episode above its group's mean, and only some of the others.

    Kept: r_i > mean(r), and a random negative_fraction of the rest (rounded up), drawn with `seed` and the group's
    number, so that a replay draws the same. Negative samples are what makes stale training unstable (Arnal et al.
    2025, arXiv:2506.20520), and discarding some preserves entropy (Kimi-Researcher, 2025); neither gives a
    fraction. Watch `version_spread` and `staleness_positive`/`staleness_negative`: survivors may be older than the
    batch.
    """
    values = scored.values
    positive = values > values.mean(dtype=np.float64) if values.size else np.zeros(0, dtype=np.bool_)
    negatives = np.flatnonzero(~positive)
    rng = np.random.default_rng((int(seed), scored.group.number))
    num_kept = int(np.ceil(negative_fraction * negatives.size))
    chosen = set(rng.permutation(negatives)[:num_kept].tolist())
    keep = tuple(bool(positive[index]) or index in chosen for index in range(values.size))
    return Selected(scored=scored, keep=keep)


def _is_truncated(episode: Episode) -> bool:
    return bool(episode.turns) and episode.turns[-1].finish_reason == "length"


def _masked(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


def _all(scored: ScoredGroup) -> tuple[bool, ...]:
    return (True,) * len(scored.scores)
