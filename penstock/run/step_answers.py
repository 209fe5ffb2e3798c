"""Reports on the answers of a step: their lengths, rewards by function, advantages, ages of their tokens, and
the tokens of a few.

Which few depends on the step's number alone, so that a repeated run reports the same ones. In a row of
`metrics.jsonl` they stand beside the trainer's own metrics. The advantages here are only shown; the trainer
computes its own from its plan.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from penstock.algorithms.advantages import ADVANTAGES, EpisodeAdvantage, StepFacts, Values
from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.returns import is_of_tokens
from penstock.loop.admission import ReadyGroup, StepGroups
from penstock.loop.attempts import Attempt
from penstock.loop.step_planner import TrainedStep
from penstock.observe.events import StalenessEvent, TokensEvent
from penstock.records import NOT_SAMPLED, IntArray, Sample, ScoredGroup, TracedTokens

PROCESS = "controller"


def answer_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute metrics over every episode that did not fail.

    An answer has the tokens of all its turns, and is truncated when its last turn ended at the token limit.
    `rewritten_by_client` and `rewritten_by_template` exist only where turns of agents could not continue the
    tokens before them, and `unread_answers` only where clients left before their answers ended.
    """
    episodes = [episode for scored in groups for episode in scored.group.episodes]
    if not episodes:
        return {}
    lengths = [episode.num_output_tokens for episode in episodes]
    truncated = [bool(episode.turns) and episode.turns[-1].finish_reason == "length" for episode in episodes]
    rewrites = Counter[str]()
    for episode in episodes:
        if episode.rewrites:
            rewrites.update(episode.rewrites)
    unread = sum(episode.unread_answers for episode in episodes)
    return {
        **({"unread_answers": float(unread)} if unread else {}),
        **{f"rewritten_by_{who}": float(count) for who, count in sorted(rewrites.items())},
        "answer_tokens_mean": float(np.mean(lengths)),
        "answer_tokens_max": float(max(lengths)),
        "truncated_fraction": float(np.mean(truncated)),
    }


def reward_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean of every reward function (unweighted), and of every named part of one, by name."""
    values: dict[str, list[float]] = {}
    for scored in groups:
        for score in scored.scores:
            for name, value in score.parts.items():
                values.setdefault(name, []).append(value)
    return {name: float(np.mean(given)) for name, given in sorted(values.items())}


def step_metrics(groups: Sequence[ScoredGroup], of_trainer: dict[str, float]) -> dict[str, float]:
    """Return all metrics of a step.

    `reward_NAME` is a function's mean. Where the trainer's metrics already use that name (`reward_mean`,
    `reward_std`), it is `reward_function_NAME`.
    """
    rewards = {
        f"reward_{name}" if f"reward_{name}" not in of_trainer else f"reward_function_{name}": mean
        for name, mean in reward_means(groups).items()
    }
    return {**of_trainer, **answer_metrics(groups), **rewards}


def episode_advantages(algorithm: AlgorithmConfig, groups: Sequence[ScoredGroup]) -> list[Values] | None:
    """Return one array per group with one value per episode; None where the algorithm gives each token its own."""
    if is_of_tokens(algorithm.advantage):
        return None
    scores = [scored.scores for scored in groups]
    lengths = [[episode.num_output_tokens for episode in scored.group.episodes] for scored in groups]
    advantage: EpisodeAdvantage = ADVANTAGES.bind(algorithm.advantage, algorithm.advantage_args)
    return advantage(StepFacts.of(scores, lengths))


def traced_tokens(step: TrainedStep, now: float) -> Iterator[TokensEvent]:
    """Yield what the trainer returned on single tokens, with what the controller knows of them.

    Ranks that share their sequences return the same tokens, which are yielded once.
    """
    seen: set[tuple[int, int, int]] = set()
    for result in step.results:
        for trace in result.traces:
            place = (trace.group, trace.episode, trace.number)
            if place in seen:
                continue
            seen.add(place)
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
    """Return the loss mask without the first token, which has no context to be predicted from."""
    mask = sample.loss_mask.astype(np.uint8)
    mask[:1] = 0
    return mask


def ages_of(sample: Sample, ready: ReadyGroup) -> IntArray:
    """Return the age of each token; -1 where none was sampled."""
    ages = np.full(len(sample.versions), -1, dtype=np.int32)
    for version in np.unique(sample.versions):
        if version != NOT_SAMPLED:
            ages[sample.versions == version] = ready.age_of(int(version))
    return ages


def staleness_of(taken: StepGroups, attempts: Mapping[int, Attempt], now: float) -> StalenessEvent:
    """Count the loss tokens of a step by age, split into the steps before their group was generated and those
    that it waited."""
    tokens: Counter[tuple[int, int]] = Counter()
    groups: Counter[int] = Counter()
    for ready in taken.groups:
        ages: Counter[int] = Counter()
        for version, count in _loss_versions(ready):
            ages[ready.age_of(version)] += count
        if not ages:
            continue
        assert ready.selected_at is not None
        generated = attempts[ready.ticket.number].generated_at
        if generated is None:  # by another process
            generated = ready.selected_at - min(ages)
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
    """Yield the versions of loss tokens in runs, since tokens of one version lie side by side."""
    parts = [sample.versions[sample.loss_mask] for samples in ready.samples for sample in samples]
    versions = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    if not versions.size:
        return
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), versions.size]
    for start, end in itertools.pairwise(starts):
        if (version := int(versions[start])) != NOT_SAMPLED:
            yield version, end - start


class TokenVocabulary:
    """Remembers which token ids have already been reported with their text."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._told: set[int] = set()

    def new_texts(self, tokens: Sequence[TokensEvent]) -> dict[int, str]:
        """Return the texts of ids that no earlier event reported."""
        ids = [np.frombuffer(event.token_ids, "<i4") for event in tokens]
        new = (
            []
            if not ids
            else [one for one in np.unique(np.concatenate(ids)).tolist() if one not in self._told]
        )
        self._told.update(new)
        return {one: self._decode([one]) or f"<{one}>" for one in new}
