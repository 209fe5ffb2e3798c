"""The config of `penstock simulate`: that of a run, and how fast its parts are."""

from pydantic import Field

from penstock.config import Section
from penstock.config.root import PenstockConfig


class SimulationConfig(Section):
    """How fast the simulated parts are, and how often their nodes die."""

    ranks: int = Field(default=1, ge=1)
    """Of the trainer."""
    batch: int = Field(default=64, ge=1)
    """Sequences that an engine computes at once; others wait."""
    answer_tokens: float = Field(default=200.0, ge=1)
    """The median length of an answer; `rollout.max_new_tokens` cuts it."""
    answer_spread: float = Field(default=0.5, ge=0)
    """The sigma of the lognormal distribution of lengths."""
    token_s: float = Field(default=0.02, gt=0)
    """From one token of a sequence to the next."""
    straggler_share: float = Field(default=0.02, ge=0, le=1)
    """Of the answers."""
    straggler_factor: float = Field(default=25.0, ge=1)
    """So many times as long do they take."""
    step_s: float = Field(default=10.0, gt=0)
    """The median time of a training step on one rank; the slowest rank decides."""
    step_spread: float = Field(default=0.05, ge=0)
    """The sigma of its lognormal distribution."""
    score_s: float = Field(default=0.1, ge=0)
    """To score an episode."""
    sync_s: float = Field(default=1.0, ge=0)
    """Until new weights have reached an engine."""
    engines_per_node: int = Field(default=8, ge=1)
    """They die together."""
    node_life_h: float = Field(default=0.0, ge=0)
    """Mean time between two deaths of a node, in hours; 0: none dies."""
    notice_s: float = Field(default=4.0, ge=0)
    """Until a death is noticed."""
    replace_s: float = Field(default=45.0, ge=0)
    """From then until another node's engines have started."""


class SimulatedConfig(PenstockConfig):
    """A run's config, and the section `simulation`."""

    simulation: SimulationConfig = SimulationConfig()
