"""Computes advantages of single tokens: returns of process rewards, and generalised advantage estimation.

A token's position is its turn and its offset in that turn's output, which is how `StepScore` names the parts
of an episode. An episode without step scores counts as one step that ends with it and has its whole score.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.algorithms.advantages import Values
from penstock.algorithms.ranges import Fraction, NotNegative
from penstock.algorithms.registry import Registry
from penstock.records import Score
from penstock.records.metrics import Deviation
from penstock.usercode import is_function_path


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the loss tokens of one training sequence, in order. `values` are the value head's, for advantages
    that use one."""

    group: int
    episode: int
    turns: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    values: Values | None = None


class TokenFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the scores of every group of the step, and this rank's sequences, which are to get advantages. What
    depends on the sequences of all ranks is exchanged by `gather`, which every rank calls."""

    scores: Sequence[Sequence[Score]]
    sequences: Sequence[SequenceTokens]
    gather: Callable[[Values], list[Values]] = lambda values: [values]


def is_of_tokens(name: str) -> bool:
    """Return whether this advantage is one of `TOKEN_ADVANTAGES`. A user's function is one when its first
    parameter is annotated with `TokenFacts`."""
    if not is_function_path(name):
        return name in TOKEN_ADVANTAGES.names()
    first = next(iter(inspect.signature(TOKEN_ADVANTAGES.get(name)).parameters.values()), None)
    return (
        first is not None and getattr(first.annotation, "__name__", first.annotation) == TokenFacts.__name__
    )


class TokenAdvantages(msgspec.Struct, frozen=True, kw_only=True):
    """Holds, per sequence, an advantage for each token and, for a value head, the values that it should have
    predicted."""

    advantages: list[Values]
    returns: list[Values] | None = None


def _checked(given: Any, facts: TokenFacts) -> TokenAdvantages:
    """Accept `TokenAdvantages` from a user's function, or an array for each sequence; refuse other shapes."""
    result = given if isinstance(given, TokenAdvantages) else TokenAdvantages(advantages=list(given))
    result = msgspec.structs.replace(result, advantages=[np.asarray(one, float) for one in result.advantages])
    shapes = [sequence.turns.shape for sequence in facts.sequences]
    got = [array.shape for array in result.advantages]
    if got != shapes:
        raise ValueError(f"one array a sequence, one value a token, of shapes {shapes}; got {got}")
    return result


TOKEN_ADVANTAGES: Registry[Callable[..., TokenAdvantages]] = Registry(
    "advantage", takes=("facts",), check=_checked
)


@TOKEN_ADVANTAGES.register("step_returns")
def step_returns(facts: TokenFacts, *, epsilon: NotNegative = 1e-6) -> TokenAdvantages:
    """Sums, for each token, the normalised process rewards of the steps that end after it.

    r̃_j = (r_j − mean) / (std + epsilon) over all steps of the group; A_t = Σ r̃_j over the steps j that end
    after token t. Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.3. With outcome
    scores alone it is GRPO.
    """
    advantages = []
    normalised = [_normalised_steps(group, epsilon) for group in facts.scores]
    for sequence in facts.sequences:
        total = np.zeros(len(sequence.turns))
        for turn, end, value in normalised[sequence.group][sequence.episode]:
            total += value * ~_ended(sequence, turn, end)
        advantages.append(total)
    return TokenAdvantages(advantages=advantages)


@TOKEN_ADVANTAGES.register("gae")
def gae(
    facts: TokenFacts, *, gamma: Fraction = 1.0, lam: Fraction = 0.95, whiten: bool = True
) -> TokenAdvantages:
    """GAE estimates each token's advantage with a value head, as PPO does.

    δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}, with V = 0 after the end; the head's targets are A_t
    + V_t; then A is whitened over the tokens of the step. Rewards fall on the last token of each step.
    Source: Schulman et al. 2016 (arXiv:1506.02438); γ = 1, λ = 0.95 and whitening as in Ziegler et al. 2019
    (arXiv:1909.08593). Each sequence is a trajectory of its own.
    """
    advantages, returns = [], []
    for sequence in facts.sequences:
        assert sequence.values is not None
        rewards = _rewards(sequence, facts.scores[sequence.group][sequence.episode])
        estimate = discounted_advantages(rewards, sequence.values, gamma, lam)
        advantages.append(estimate)
        returns.append(estimate + sequence.values)
    if whiten:
        advantages = _whitened(advantages, facts.gather)
    return TokenAdvantages(advantages=advantages, returns=returns)


def _whitened(estimates: list[Values], gather: Callable[[Values], list[Values]]) -> list[Values]:
    """Shift and scale to mean 0 and deviation 1 over the tokens of the step on all ranks."""
    own = Deviation.of(np.concatenate([np.zeros(0), *estimates]))
    parts = gather(np.array([own.count, own.mean, own.squares]))
    whole = reduce(
        lambda one, other: one.plus(other),
        [Deviation(count=count, mean=mean, squares=squares) for count, mean, squares in parts],
    )
    return [(estimate - whole.mean) / (whole.value + 1e-8) for estimate in estimates]


def discounted_advantages(rewards: Values, values: Values, gamma: float, lam: float) -> Values:
    """Run GAE's recursion over one sequence, from the last token to the first."""
    advantages = np.zeros(len(rewards))
    next_value = running = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        delta = rewards[index] + gamma * next_value - values[index]
        running = delta + gamma * lam * running
        advantages[index] = running
        next_value = values[index]
    return advantages


def _steps(score: Score) -> list[tuple[float, float, float]]:
    """Return (turn, end, value) of each step."""
    if not score.steps:
        return [(np.inf, np.inf, score.value)]
    return [(step.turn, step.end, step.value) for step in score.steps]


def _normalised_steps(group: Sequence[Score], epsilon: float) -> list[list[tuple[float, float, float]]]:
    episodes = [_steps(score) for score in group]
    values = np.array([value for steps in episodes for _, _, value in steps])
    if values.size < 2 or values.min() == values.max():
        return [[(turn, end, 0.0) for turn, end, _ in steps] for steps in episodes]
    mean, std = float(values.mean()), float(values.std(ddof=1))
    return [
        [(turn, end, (value - mean) / (std + epsilon)) for turn, end, value in steps] for steps in episodes
    ]


def _ended(sequence: SequenceTokens, turn: float, end: float) -> npt.NDArray[np.bool_]:
    """Return, for each token, whether the step was over before it."""
    over: npt.NDArray[np.bool_] = (sequence.turns > turn) | (
        (sequence.turns == turn) & (sequence.offsets >= end)
    )
    return over


def _rewards(sequence: SequenceTokens, score: Score) -> Values:
    """Put each step's value on the last token of the sequence that comes before the step's end."""
    rewards = np.zeros(len(sequence.turns))
    for turn, end, value in _steps(score):
        inside = np.flatnonzero(~_ended(sequence, turn, end))
        if inside.size:
            rewards[inside[-1]] += value
    return rewards
