"""The advantages of a step's episodes, for whoever reads its samples. The trainer computes them from its plan."""

from collections.abc import Sequence

from penstock.algorithms.advantages import ADVANTAGES, EpisodeAdvantage, StepFacts, Values
from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.returns import is_of_tokens
from penstock.types import ScoredGroup


def episode_advantages(algorithm: AlgorithmConfig, groups: Sequence[ScoredGroup]) -> list[Values] | None:
    """One array per group, one value per episode; None where the algorithm gives each token its own."""
    if is_of_tokens(algorithm.advantage):
        return None
    scores = [scored.scores for scored in groups]
    lengths = [[episode.num_output_tokens for episode in scored.group.episodes] for scored in groups]
    advantage: EpisodeAdvantage = ADVANTAGES.bind(algorithm.advantage, algorithm.advantage_args)
    return advantage(StepFacts.of(scores, lengths))
