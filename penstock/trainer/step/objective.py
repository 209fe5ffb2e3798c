"""Puts together what a step minimises: the policy loss, its corrections and its penalties.

Per token, loss = (policy loss × correction weights + kl_coef · KL − entropy_coef · entropy + value_coef ·
value loss) × share, where the shares come from the plan's step-wide denominators.
"""

from dataclasses import dataclass, replace

import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import COVERS_BEHAVIOUR, LOSSES
from penstock.algorithms.tokens import LossTokens, segment_sum
from penstock.errors import UserError
from penstock.trainer.forward.packed_model import PackedModel, TokenOutputs
from penstock.trainer.forward.value_head import value_loss
from penstock.trainer.step.step_preparation import PreparedRow
from penstock.usercode import is_function_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimised:
    """Holds the loss of a row, with gradient, and what the step's metrics are made of."""

    loss: torch.Tensor
    columns: dict[str, torch.Tensor]
    """(loss tokens,) each."""
    routing: torch.Tensor | None
    """The same as in `TokenOutputs`."""
    own_columns: tuple[str, ...] = ()
    """Names of the columns that a user's loss reports."""


class Objective:
    """Computes the loss of a prepared row, with gradient, and columns for the step's metrics."""

    def __init__(self, policy: PackedModel, algorithm: AlgorithmConfig) -> None:
        self._policy, self._algorithm = policy, algorithm
        self._loss = LOSSES.bind(algorithm.loss, algorithm.loss_args)
        self._kl = KL_ESTIMATORS.bind(algorithm.kl_estimator, {})
        self._corrections = [CORRECTIONS.bind(*item) for item in algorithm.corrections.items()]
        self._engine_corrections = [CORRECTIONS.bind(*item) for item in algorithm.engine_corrections.items()]

    def __call__(self, prepared: PreparedRow) -> Minimised:
        outputs = self._policy(prepared.row)
        whole = prepared.tokens(outputs.logprobs, self._algorithm.effective_proximal)
        tokens, nonfinite, left_out = without_nonfinite(whole)
        tokens = self._weighted(tokens, prepared.fresh)
        values = self._loss(tokens)
        penalties, facts = self._penalties(prepared, outputs)
        columns = {
            "gap": tokens.gap(),
            "advantage": tokens.advantages,
            "age": tokens.ages,
            "entropy": outputs.entropy,
            "weight": tokens.weights,
            "fresh": prepared.fresh,
            "nonfinite": nonfinite,
            "left_out": left_out,
            **facts,
        }
        own = tuple(values.facts) if is_function_path(self._algorithm.loss) else ()
        if taken := columns.keys() & own:
            raise UserError(
                f"the loss {self._algorithm.loss!r} reports {min(taken)!r}, which every step reports itself; give "
                "it another name"
            )
        loss = ((values.loss + penalties) * prepared.shares).sum()
        columns |= values.facts
        return Minimised(loss=loss, columns=columns, routing=outputs.routing, own_columns=own)

    def _weighted(self, tokens: LossTokens, fresh: torch.Tensor) -> LossTokens:
        """Multiply the weights of all corrections. Engine corrections touch only fresh tokens, where the gap is
        the engine's alone."""
        weights = tokens.weights
        seen = tokens
        if self._algorithm.loss in COVERS_BEHAVIOUR:  # no gap is left for a weight to cover
            seen = replace(tokens, old_logprobs=tokens.behaviour_logprobs)
        for correction in self._corrections:
            weights = weights * correction(seen)
        for correction in self._engine_corrections:
            weights = weights * correction(seen).where(fresh, torch.ones_like(weights))
        return tokens.with_weights(weights.detach())

    def _penalties(
        self, prepared: PreparedRow, outputs: TokenOutputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = torch.zeros_like(outputs.logprobs)
        facts = {}
        if prepared.reference_logprobs is not None:
            kl = self._kl(outputs.logprobs, prepared.reference_logprobs)
            facts["reference_kl"] = kl
            total = total + self._algorithm.kl_coef * kl
        if self._algorithm.entropy_coef:
            total = total - self._algorithm.entropy_coef * outputs.entropy
        if outputs.values is not None and prepared.returns is not None:
            assert prepared.start is not None
            assert prepared.start.values is not None
            error = value_loss(
                outputs.values, prepared.start.values, prepared.returns, self._algorithm.value_clip
            )
            facts |= {"value_loss": error, "value_mean": outputs.values, "return_mean": prepared.returns}
            total = total + self._algorithm.value_coef * error
        return total, facts


def idle_corrections(algorithm: AlgorithmConfig) -> list[str]:
    """Return advice about each correction whose weight is always 1, because the loss covers the gap already. Each
    is tried on synthetic tokens: it is idle if it gives all of them weight 1 here, but not with `proximal:
    start`."""
    covers = algorithm.loss in COVERS_BEHAVIOUR
    proximal = "behaviour" if covers else algorithm.effective_proximal
    said = []
    for section in ("corrections", "engine_corrections"):
        for name, arguments in getattr(algorithm, section).items():
            correction = CORRECTIONS.bind(name, arguments)
            try:
                acts_here, acts_there = (
                    bool((correction(_synthetic_tokens(of)) != 1).any()) for of in (proximal, "start")
                )
            except Exception:  # a user's function may need columns, which these tokens do not have
                continue
            if acts_there and not acts_here:
                why = (
                    f"algorithm.loss={algorithm.loss} weights by that gap itself; take it out"
                    if covers
                    else "algorithm.proximal=behaviour leaves the loss's own ratio no gap to correct; set "
                    "algorithm.proximal=start, or take it out"
                )
                said.append(f"algorithm.{section}.{name} does nothing: {why}")
    return said


def _synthetic_tokens(proximal: str) -> LossTokens:
    """Make eight synthetic sequences whose logprobs rose or fell after they were sampled, by little or much."""
    segments = torch.arange(8).repeat_interleave(8)
    gaps = torch.linspace(-4.0, 4.0, 8)[segments] + torch.linspace(-1.0, 1.0, 8).repeat(8)
    logprobs = torch.full((64,), -6.0)
    return LossTokens(
        logprobs=logprobs,
        old_logprobs=logprobs - gaps if proximal == "behaviour" else logprobs,
        behaviour_logprobs=logprobs - gaps,
        advantages=torch.tensor([1.0, -1.0]).repeat(32),
        ages=torch.arange(64.0),
        segments=segments,
        num_segments=8,
        weights=torch.ones(64),
    )


def without_nonfinite(tokens: LossTokens) -> tuple[LossTokens, torch.Tensor, torch.Tensor]:
    """Take every sequence with a logprob that is not finite out of the loss: one such token makes the ratio of
    its whole sequence unknown. Return the tokens, which of them are not finite, and which are out."""
    columns = (tokens.logprobs, tokens.old_logprobs, tokens.behaviour_logprobs)
    bad = ~torch.stack([column.detach() for column in columns]).isfinite().all(dim=0)
    per_sequence = segment_sum(bad.to(tokens.weights.dtype), tokens.segments, tokens.num_segments)
    out = (per_sequence > 0)[tokens.segments]
    logprobs, old, behaviour = (column.masked_fill(out, 0.0) for column in columns)
    kept = replace(
        tokens,
        logprobs=logprobs,
        old_logprobs=old,
        behaviour_logprobs=behaviour,
        weights=tokens.weights.masked_fill(out, 0.0),
    )
    return kept, bad, out
