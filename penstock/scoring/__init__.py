"""Scoring: the stage between rollout and buffer. A scorer that fails costs its group, not the run."""

from penstock.scoring.config import RewardConfig, RewardFunctionConfig
from penstock.scoring.functions import RewardFunction, score_group
from penstock.scoring.loader import chosen_functions, load_functions, reward_function
from penstock.scoring.local import MemoryScorer, ThreadScorer
from penstock.scoring.pool import ScorerPool, ScoringWorker

__all__ = [
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardFunction",
    "chosen_functions",
    "load_functions",
    "reward_function",
    "score_group",
    "ThreadScorer",
    "MemoryScorer",
    "ScorerPool",
    "ScoringWorker",
]
