"""The `algorithm` section says which advantage, loss and corrections a run uses, with their parameters."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.algorithms.advantages import ADVANTAGES, StepFacts
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES
from penstock.algorithms.registry import Registry
from penstock.algorithms.returns import TOKEN_ADVANTAGES, is_of_tokens
from penstock.algorithms.selection import SELECTIONS
from penstock.config import Section
from penstock.errors import ConfigError
from penstock.records import Score
from penstock.usercode import is_function_path

Arguments = dict[str, bool | float | str]
"""Settings of a function: its keyword parameters."""


def default_corrections() -> dict[str, Arguments]:
    """Return the corrections that `python -m benchmarks learning` found best at staleness 4
    (docs/algorithms.md)."""
    return {"negative_sequence_mask": {}}


class AlgorithmConfig(Section):
    """Sets what a step optimises. Each name is one of `penstock list algorithms`, or the path of your own
    function (`file.py:function`, `module:function`). `…_args` set a function's parameters; a parameter that
    is not set has the default of its source."""

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
    """Filters and changes applied to a scored group before it is buffered: name to parameters, in this order."""
    length_norm: Literal["token", "sequence", "constant"] = "token"
    """How token losses are averaged: over all tokens of the step, per sequence and then over sequences, or
    over sequences with a constant length."""
    length_constant: int = Field(default=1024, ge=1)
    """The length that `length_norm: constant` divides by."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the frozen reference model; 0 needs no reference."""
    kl_estimator: str = "k3"
    """The estimator of the KL to the reference model."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    value_coef: float = Field(default=0.1, ge=0)
    """Weight of the value head's loss, where the advantage has a value head."""
    value_clip: float = Field(default=0.2, gt=0)
    """How far a value may move from its start in one step before its loss is clipped."""

    @property
    def needs_reference(self) -> bool:
        """Return whether the trainer must hold a frozen copy of the model."""
        return self.kl_coef > 0

    @property
    def needs_group(self) -> bool:
        """Return whether groups of one would never teach anything, because any single score gives advantage
        zero. Token advantages may learn from one episode, by its steps or its values."""
        if is_function_path(self.advantage) or self.advantage in TOKEN_ADVANTAGES.names():
            return False
        lone = StepFacts.of([[Score(value=0.0)], [Score(value=1.0)]])
        return not any(group.any() for group in ADVANTAGES.bind(self.advantage, self.advantage_args)(lone))

    @property
    def needs_values(self) -> bool:
        """Return whether the trainer must have a value head."""
        return self.advantage == "gae"

    @property
    def effective_proximal(self) -> Literal["behaviour", "start"]:
        """Return `proximal`, or `start` for decoupled PPO, which is relative to the start of the step by
        definition."""
        return "start" if self.loss == "decoupled" else self.proximal

    @model_validator(mode="after")
    def _names_exist(self) -> "AlgorithmConfig":
        for registry, name, _ in self._functions():
            if name not in registry.names():
                _refuse_another_kind(name, registry.kind)
        named = {*ADVANTAGES.names(), *TOKEN_ADVANTAGES.names()}
        if self.advantage not in named and not is_function_path(self.advantage):
            raise ConfigError(f"unknown advantage {self.advantage!r}; known: {', '.join(sorted(named))}")
        for registry, name, arguments in self._functions():
            registry.check_name(name, arguments)
        if self.kl_estimator == "k1" and self.kl_coef > 0:
            raise ConfigError(
                "kl_estimator must be k2 or k3 where kl_coef > 0, got k1: its expected gradient as a loss is zero"
            )
        return self

    def load(self) -> None:
        """Load the functions that are named by path, and raise a one-sentence error about one that can't be
        used."""
        for registry, name, arguments in self._functions():
            if is_function_path(name):
                if registry is ADVANTAGES and is_of_tokens(name):
                    registry = TOKEN_ADVANTAGES
                registry.bind(name, arguments)

    def paths(self) -> tuple[str, ...]:
        """Return the paths of the user's own functions."""
        return tuple(name for _, name, _ in self._functions() if is_function_path(name))

    def _functions(self) -> Iterator[tuple[Registry[Any], str, Arguments]]:
        of_tokens = self.advantage in TOKEN_ADVANTAGES.names()
        yield TOKEN_ADVANTAGES if of_tokens else ADVANTAGES, self.advantage, self.advantage_args
        yield LOSSES, self.loss, self.loss_args
        yield KL_ESTIMATORS, self.kl_estimator, {}
        yield from ((CORRECTIONS, *item) for item in self.corrections.items())
        yield from ((CORRECTIONS, *item) for item in self.engine_corrections.items())
        yield from ((SELECTIONS, *item) for item in self.selection.items())


def _refuse_another_kind(name: str, kind: str) -> None:
    """Refuse a name that is none of this kind but one of another setting's, and name that setting."""
    others = {
        "an advantage": ("advantage={}", (*ADVANTAGES.names(), *TOKEN_ADVANTAGES.names())),
        "a loss": ("loss={}", LOSSES.names()),
        "a correction": ("corrections={{{}: {{}}}}", CORRECTIONS.names()),
        "a KL estimator": ("kl_estimator={}", KL_ESTIMATORS.names()),
        "a selection": ("selection={{{}: {{}}}}", SELECTIONS.names()),
    }
    for other, (setting, names) in others.items():
        if name in names:
            raise ConfigError(f"{name!r} is {other} and no {kind}; set algorithm.{setting.format(name)}")
