"""What a step minimises: advantages, corrections, the policy loss and its penalties, put together.

Per token, loss = (policy loss × correction weights + kl_coef · KL − entropy_coef · entropy) × share, where
the shares come from the plan's step-wide denominators.
"""

from dataclasses import dataclass

import torch

from penstock.algorithms.advantages import ADVANTAGES, StepFacts, Values
from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES
from penstock.algorithms.tokens import LossTokens
from penstock.trainer.batch import PackedRow
from penstock.trainer.config import TrainerConfig
from penstock.trainer.policy import PackedModel
from penstock.types import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRow:
    """A packed row with all that does not depend on the weights while they are being trained."""

    row: PackedRow
    advantages: torch.Tensor
    shares: torch.Tensor
    """What each token's loss counts for in the step."""
    start_logprobs: torch.Tensor | None
    """Under the weights at the start of the step, where a later pass needs them."""
    reference_logprobs: torch.Tensor | None


class Objective:
    """Prepares the rows of a plan, then gives the loss of each."""

    def __init__(
        self,
        policy: PackedModel,
        reference: PackedModel | None,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        device: str,
    ) -> None:
        self._policy, self._reference = policy, reference
        self._algorithm, self._config, self._device = algorithm, config, device
        self._advantage = ADVANTAGES.bind(algorithm.advantage, algorithm.advantage_args)
        self._loss = LOSSES.bind(algorithm.loss, algorithm.loss_args)
        self._kl = KL_ESTIMATORS.get(algorithm.kl_estimator)
        self._corrections = [CORRECTIONS.bind(*item) for item in algorithm.corrections.items()]
        self._engine_corrections = [CORRECTIONS.bind(*item) for item in algorithm.engine_corrections.items()]

    @torch.no_grad()
    def prepare(self, plan: StepPlan) -> list[PreparedRow]:
        advantages = self._advantage(StepFacts.of(plan.scores, plan.num_tokens))
        prepared = []
        for sequences in plan.micro_batches:
            row = PackedRow.of(sequences, self._device)
            if row is not None:
                prepared.append(self._prepare_row(row, advantages, plan))
        return prepared

    def __call__(
        self, prepared: PreparedRow, plan: StepPlan
    ) -> tuple[torch.Tensor, LossTokens, torch.Tensor, dict[str, torch.Tensor]]:
        """The row's part of the step's loss (with gradient), its tokens, entropy and facts for metrics."""
        logprobs, entropy = self._policy(prepared.row)
        tokens = self._tokens(prepared, logprobs, plan.version)
        values = self._loss(tokens)
        per_token, facts = values.loss, dict(values.facts)
        if prepared.reference_logprobs is not None:
            kl = self._kl(logprobs, prepared.reference_logprobs)
            facts["reference_kl"] = kl.detach()
            per_token = per_token + self._algorithm.kl_coef * kl
        if self._algorithm.entropy_coef:
            per_token = per_token - self._algorithm.entropy_coef * entropy
        return (per_token * prepared.shares).sum(), tokens, entropy, facts

    def _prepare_row(self, row: PackedRow, advantages: list[Values], plan: StepPlan) -> PreparedRow:
        of_sequence = torch.tensor(
            [advantages[sequence.group][sequence.episode] for sequence in row.sequences],
            dtype=torch.float32,
            device=self._device,
        )
        needs_start = self._config.passes > 1 and self._algorithm.proximal == "start"
        return PreparedRow(
            row=row,
            advantages=of_sequence[row.segments],
            shares=self._shares(row, plan),
            start_logprobs=self._policy(row)[0] if needs_start else None,
            reference_logprobs=self._reference(row)[0] if self._reference is not None else None,
        )

    def _shares(self, row: PackedRow, plan: StepPlan) -> torch.Tensor:
        counts = torch.tensor(row.counts, dtype=torch.float32, device=self._device)[row.segments]
        match self._algorithm.length_norm:
            case "token":
                return torch.full_like(counts, 1 / plan.num_loss_tokens)
            case "sequence":
                return 1 / (counts * plan.num_sequences)
            case "constant":
                return torch.full_like(counts, 1 / (self._algorithm.length_constant * plan.num_sequences))

    def _tokens(self, prepared: PreparedRow, logprobs: torch.Tensor, version: int) -> LossTokens:
        row = prepared.row
        current = logprobs.detach()
        old = row.behaviour_logprobs
        if self._algorithm.proximal == "start":
            old = current if prepared.start_logprobs is None else prepared.start_logprobs
        ages = (version - row.versions).float()
        tokens = LossTokens(
            logprobs=logprobs,
            old_logprobs=old,
            behaviour_logprobs=row.behaviour_logprobs,
            advantages=prepared.advantages,
            ages=ages,
            segments=row.segments,
            num_segments=len(row.counts),
            weights=torch.ones_like(current),
        )
        weights = tokens.weights
        for correction in self._corrections:
            weights = weights * correction(tokens)
        for correction in self._engine_corrections:
            weights = weights * torch.where(ages == 0, correction(tokens), 1.0)
        return tokens.with_weights(weights.detach())
