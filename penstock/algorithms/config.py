"""The `algorithm` section: which advantage, loss and corrections, and their parameters."""

from typing import Literal

from pydantic import Field, model_validator

from penstock.algorithms.advantages import ADVANTAGES, StepFacts
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES
from penstock.algorithms.returns import TOKEN_ADVANTAGES
from penstock.algorithms.selection import SELECTIONS
from penstock.config import Section
from penstock.errors import ConfigError
from penstock.types import Score

Arguments = dict[str, float]


def default_corrections() -> dict[str, Arguments]:
    """What `penstock bench learning` found best at staleness 4 (docs/algorithms.md)."""
    return {"negative_sequence_mask": {}}


class AlgorithmConfig(Section):
    """What a step optimises. Names are those of `penstock list algorithms`; `…_args` set an entry's
    parameters, and what is not set has the default of its source."""

    advantage: str = "grpo"
    """How scores become advantages."""
    advantage_args: Arguments = Field(default_factory=dict)
    """Parameters of the advantage."""
    loss: str = "topr"
    """The policy loss."""
    loss_args: Arguments = Field(default_factory=dict)
    """Parameters of the loss."""
    proximal: Literal["behaviour", "start"] = "behaviour"
    """What the loss's ratio is relative to: the recorded behaviour policy, or the policy at the start
    of the step (decoupled PPO; use it with a weight among the corrections)."""
    corrections: dict[str, Arguments] = Field(default_factory=default_corrections)
    """Corrections for the gap between behaviour and current policy: name to parameters, all applied."""
    engine_corrections: dict[str, Arguments] = Field(default_factory=dict)
    """Corrections for the gap between inference and training engine, on tokens of the current version."""
    selection: dict[str, Arguments] = Field(default_factory=dict)
    """What happens to a scored group before it is buffered: name to parameters, applied in this order."""
    length_norm: Literal["token", "sequence", "constant"] = "token"
    """How token losses are averaged: over all tokens of the step, per sequence and then over sequences, or
    over sequences with a constant length."""
    length_constant: int = Field(default=1024, ge=1)
    """The length that `length_norm: constant` divides by."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the frozen reference model; 0 needs no reference."""
    kl_estimator: str = "k3"
    """Which estimator of that KL."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    value_coef: float = Field(default=0.1, ge=0)
    """Weight of the value head's loss, where the advantage has a value head."""
    value_clip: float = Field(default=0.2, gt=0)
    """How far a value may move from its start in one step before its loss is clipped."""

    @property
    def needs_reference(self) -> bool:
        """Whether the trainer must hold a frozen copy of the model."""
        return self.kl_coef > 0

    @property
    def needs_group(self) -> bool:
        """Whether groups of one would never teach anything: two with different scores both get zero. Token
        advantages may learn from one episode, by its steps or its values."""
        if self.advantage in TOKEN_ADVANTAGES.names():
            return False
        lone = StepFacts.of([[Score(value=0.0)], [Score(value=1.0)]])
        return not any(group.any() for group in ADVANTAGES.bind(self.advantage, self.advantage_args)(lone))

    @property
    def needs_values(self) -> bool:
        """Whether the trainer must have a value head."""
        return self.advantage == "gae"

    @property
    def effective_proximal(self) -> Literal["behaviour", "start"]:
        """Decoupled PPO is relative to the start of the step by definition."""
        return "start" if self.loss == "decoupled" else self.proximal

    @model_validator(mode="after")
    def _names_exist(self) -> "AlgorithmConfig":
        if self.advantage in TOKEN_ADVANTAGES.names():
            TOKEN_ADVANTAGES.bind(self.advantage, self.advantage_args)
        elif self.advantage in ADVANTAGES.names():
            ADVANTAGES.bind(self.advantage, self.advantage_args)
        else:
            known = ", ".join(sorted((*ADVANTAGES.names(), *TOKEN_ADVANTAGES.names())))
            raise ConfigError(f"unknown advantage {self.advantage!r}; known: {known}")
        LOSSES.bind(self.loss, self.loss_args)
        KL_ESTIMATORS.get(self.kl_estimator)
        if self.kl_estimator == "k1" and self.kl_coef > 0:
            raise ConfigError(
                "kl_estimator must be k2 or k3 where kl_coef > 0, got k1: its expected gradient as a loss is zero"
            )
        for registry, stack in (
            (CORRECTIONS, self.corrections),
            (CORRECTIONS, self.engine_corrections),
            (SELECTIONS, self.selection),
        ):
            for name, arguments in stack.items():
                registry.bind(name, arguments)
        return self
