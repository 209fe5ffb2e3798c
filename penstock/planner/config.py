"""Defines the config of `penstock simulate`: that of a run, and how fast its parts are."""

from pydantic import Field

from penstock.config import Section
from penstock.config.root import PenstockConfig


class SimulationConfig(Section):
    """Sets how fast the simulated parts are, and how often their nodes die."""

    ranks: int = Field(default=1, ge=1)
    """Ranks of the trainer."""
    batch: int = Field(default=64, ge=1)
    """Sequences that an engine generates at once; others wait."""
    answer_tokens: float = Field(default=200.0, ge=1)
    """The median length of an answer; `rollout.max_new_tokens` cuts it."""
    answer_spread: float = Field(default=0.5, ge=0)
    """The sigma of the lognormal distribution of lengths."""
    token_s: float = Field(default=0.02, gt=0)
    """Seconds from one token of a sequence to the next."""
    straggler_share: float = Field(default=0.02, ge=0, le=1)
    """Share of answers that are stragglers."""
    straggler_factor: float = Field(default=25.0, ge=1)
    """How many times as long a straggler's tokens take."""
    step_s: float = Field(default=10.0, gt=0)
    """Median seconds of a training step on one rank; the slowest rank decides."""
    step_spread: float = Field(default=0.05, ge=0)
    """The sigma of the lognormal distribution of step times."""
    score_s: float = Field(default=0.1, ge=0)
    """Seconds to score an episode."""
    sync_s: float = Field(default=1.0, ge=0)
    """Seconds in which an engine copies new weights: while it generates, where the transport stages them,
    otherwise while it is paused."""
    engines_per_node: int = Field(default=8, ge=1)
    """Engines on a node, which die together."""
    node_life_h: float = Field(default=0.0, ge=0)
    """Mean hours between two deaths of a node; 0: no node dies."""
    notice_s: float = Field(default=4.0, ge=0)
    """Seconds until a death is noticed."""
    replace_s: float = Field(default=45.0, ge=0)
    """Seconds from noticing a death until the engines of another node have started."""


class SimulatedConfig(PenstockConfig):
    """Adds the section `simulation` to a run's config."""

    simulation: SimulationConfig = SimulationConfig()
