"""Whose tokens are told one by one: a few answers of each step, chosen by the number of the step alone, so that a
repeated run tells the same ones; and how old all tokens of a step were."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.buffer.admission import ReadyGroup, StepGroups
from penstock.observe.events import StalenessEvent, TokensEvent
from penstock.orchestration.group_lives import GroupLives
from penstock.orchestration.step_planner import TrainedStep
from penstock.types import NOT_SAMPLED, IntArray, Sample, TracedTokens

PROCESS = "controller"


def traced_tokens(step: TrainedStep, now: float) -> Iterator[TokensEvent]:
    """What the trainer handed back, beside what the controller knows of the same tokens. Ranks that share their
    sequences hand back the same."""
    told: set[tuple[int, int, int]] = set()
    for result in step.results:
        for trace in result.traces:
            place = (trace.group, trace.episode, trace.number)
            if place in told:
                continue
            told.add(place)
            ready = step.taken.groups[trace.group]
            sample = ready.samples[trace.episode][trace.number]
            yield _event(step.number, ready, sample, trace, now)


def _event(step: int, ready: ReadyGroup, sample: Sample, trace: TracedTokens, now: float) -> TokensEvent:
    clipped = b"" if trace.clipped is None else (trace.clipped > 0.5).astype(np.uint8).tobytes()
    return TokensEvent(
        process=PROCESS,
        time=now,
        step=step,
        group=ready.ticket.number,
        episode=ready.scored.group.episodes[trace.episode].index,
        sample=trace.number,
        token_ids=sample.token_ids.astype("<i4").tobytes(),
        versions=sample.versions.astype("<i4").tobytes(),
        ages=ages_of(sample, ready).astype("<i4").tobytes(),
        loss_mask=_loss_mask(sample).tobytes(),
        logprobs=sample.logprobs.astype("<f4").tobytes(),
        gaps=trace.gaps.astype("<f4").tobytes(),
        advantages=trace.advantages.astype("<f4").tobytes(),
        weights=trace.weights.astype("<f4").tobytes(),
        clipped=clipped,
    )


def _loss_mask(sample: Sample) -> np.ndarray:
    """A first token has no context to be predicted from, so the trainer has nothing on it."""
    mask = sample.loss_mask.astype(np.uint8)
    mask[:1] = 0
    return mask


def ages_of(sample: Sample, ready: ReadyGroup) -> IntArray:
    """The age of each token; -1 where none was sampled."""
    ages = np.full(len(sample.versions), -1, dtype=np.int32)
    for version in np.unique(sample.versions):
        if version != NOT_SAMPLED:
            ages[sample.versions == version] = ready.age_of(int(version))
    return ages


def staleness_of(taken: StepGroups, lives: GroupLives, now: float) -> StalenessEvent:
    """Of all loss tokens of a step."""
    tokens: Counter[tuple[int, int]] = Counter()
    groups: Counter[int] = Counter()
    for ready in taken.groups:
        ages: Counter[int] = Counter()
        for version, count in _loss_versions(ready):
            ages[ready.age_of(version)] += count
        if not ages:
            continue
        assert ready.selected_at is not None
        generated = lives.step_generated(ready.ticket.number, otherwise=ready.selected_at - min(ages))
        waited = max(0, ready.selected_at - generated)
        for age, count in ages.items():
            tokens[age - min(age, waited), min(age, waited)] += count
        groups[max(ages)] += 1
    return StalenessEvent(
        process=PROCESS,
        time=now,
        step=taken.step + 1,
        tokens=tuple((*ages, count) for ages, count in sorted(tokens.items())),
        groups=tuple(sorted(groups.items())),
    )


def _loss_versions(ready: ReadyGroup) -> Iterator[tuple[int, int]]:
    """In runs: tokens of one version lie beside each other."""
    parts = [sample.versions[sample.loss_mask] for samples in ready.samples for sample in samples]
    versions = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    if not versions.size:
        return
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), versions.size]
    for start, end in itertools.pairwise(starts):
        if (version := int(versions[start])) != NOT_SAMPLED:
            yield version, end - start


class TokenVocabulary:
    """Which token ids have been told how they read."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._told: set[int] = set()

    def new_texts(self, tokens: Sequence[TokensEvent]) -> dict[int, str]:
        """Of ids that no event before has told of."""
        ids = [np.frombuffer(event.token_ids, "<i4") for event in tokens]
        new = (
            []
            if not ids
            else [one for one in np.unique(np.concatenate(ids)).tolist() if one not in self._told]
        )
        self._told.update(new)
        return {one: self._decode([one]) or f"<{one}>" for one in new}
