"""The `algorithm` section: which advantage, loss and corrections, and their parameters."""

from typing import Literal

from pydantic import Field, model_validator

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES
from penstock.config import Section

Arguments = dict[str, float]


class AlgorithmConfig(Section):
    """What a step optimises. Names are those of `penstock list algorithms`; `…_args` set an entry's
    parameters, and what is not set has the default of its source."""

    advantage: str = "grpo"
    """How scores become advantages."""
    advantage_args: Arguments = Field(default_factory=dict)
    """Parameters of the advantage."""
    loss: str = "clip"
    """The policy loss."""
    loss_args: Arguments = Field(default_factory=dict)
    """Parameters of the loss."""
    proximal: Literal["behaviour", "start"] = "behaviour"
    """What the loss's ratio is relative to: the recorded behaviour policy, or the policy at the start
    of the step (decoupled PPO; use it with a weight among the corrections)."""
    corrections: dict[str, Arguments] = Field(default_factory=dict)
    """Corrections for the gap between behaviour and current policy: name to parameters, all applied."""
    engine_corrections: dict[str, Arguments] = Field(default_factory=dict)
    """Corrections for the gap between inference and training engine, on tokens of the current version."""
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

    @model_validator(mode="after")
    def _names_exist(self) -> "AlgorithmConfig":
        ADVANTAGES.bind(self.advantage, self.advantage_args)
        LOSSES.bind(self.loss, self.loss_args)
        KL_ESTIMATORS.get(self.kl_estimator)
        for stack in (self.corrections, self.engine_corrections):
            for name, arguments in stack.items():
                CORRECTIONS.bind(name, arguments)
        return self
