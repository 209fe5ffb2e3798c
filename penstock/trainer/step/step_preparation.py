"""Prepares what a step needs before its first update: packed rows, advantages, shares, reference logprobs.

Some algorithms need facts of the whole step under the weights at its start (values for GAE, M2PO's threshold, the
proximal policy of several passes). Only these need a forward pass of the policy without gradient first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.algorithms.advantages import ADVANTAGES, StepFacts
from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.losses import statistic_of
from penstock.algorithms.returns import (
    TOKEN_ADVANTAGES,
    SequenceTokens,
    TokenAdvantages,
    TokenFacts,
    is_of_tokens,
)
from penstock.algorithms.tokens import LossTokens, TokenColumns
from penstock.errors import BlobLost
from penstock.records import NOT_SAMPLED, RoutingShape, StepPlan, TrainSequence
from penstock.records.interfaces import BlobStore, Ranks
from penstock.records.routing_records import check_routing
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.packed_model import PackedModel, TokenOutputs
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.forward.reference_policy import Reference
from penstock.trainer.parallel.ranks import SingleRank
from penstock.trainer.step.packing import pack
from penstock.trainer.step.sharing import forward_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRow:
    """Holds a packed row with everything that stays the same while the weights are trained on it."""

    row: PackedRow
    ages: torch.Tensor
    fresh: torch.Tensor
    """Whether each token was sampled with the current version, and all that it read was computed with it."""
    advantages: torch.Tensor
    shares: torch.Tensor
    """The factor of each token's loss in the step."""
    start: TokenOutputs | None = None
    """Outputs under the weights at the start of the step, if the algorithm needs them."""
    returns: torch.Tensor | None = None
    """The value head's targets."""
    reference_logprobs: torch.Tensor | None = None
    statistic: float = float("inf")

    def old_logprobs(self, current: torch.Tensor, proximal: str) -> torch.Tensor:
        """Return the logprobs that ratios are relative to. In a first pass, the policy at the start is the
        current one."""
        if proximal == "behaviour":
            return self.row.behaviour_logprobs
        return current.detach() if self.start is None else self.start.logprobs

    def tokens(self, logprobs: torch.Tensor, proximal: str) -> LossTokens:
        """Return the row's loss tokens as losses and corrections see them, not yet weighted."""
        return LossTokens(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs(logprobs, proximal),
            behaviour_logprobs=self.row.behaviour_logprobs,
            advantages=self.advantages,
            ages=self.ages,
            segments=self.row.segments,
            num_segments=len(self.row.counts),
            weights=torch.ones_like(self.advantages),
            statistic=self.statistic,
            columns=TokenColumns(self.row.columns),
        )


class Preparation:
    """Turns plans into prepared rows."""

    def __init__(
        self,
        policy: PackedModel,
        reference: Reference | None,
        algorithm: AlgorithmConfig,
        *,
        config: TrainerConfig,
        device: str,
        blobs: BlobStore | None = None,
        ranks: Ranks | None = None,
        filler: PackedRow | None = None,
    ) -> None:
        """`filler` is the row that a rank runs while others have more rows, because all ranks gather weights
        together. None if ranks do not wait for each other within a step."""
        self._filler = filler
        self.expects_routes = False
        """Whether experts are recorded in this run."""
        self.num_fillers = 0
        """How many fillers this rank runs for the last plan."""
        self._policy, self._reference, self._algorithm = policy, reference, algorithm
        self._device, self._config = device, config
        self._blobs = blobs
        self._ranks: Ranks = ranks or SingleRank()
        can_share = policy.shares_prefixes and (reference is None or reference.shares_prefixes)
        self.shares_prompts = config.shared_prompts and can_share
        """Whether rows hold a group's prompt once."""
        self.needs_start = (
            algorithm.needs_values
            or statistic_of(algorithm.loss) is not None
            or (config.passes > 1 and algorithm.effective_proximal == "start")
        )
        """Whether a forward pass without gradient comes first."""

    @torch.no_grad()
    def __call__(self, plan: StepPlan) -> list[PreparedRow]:
        rows = self._lay_out(plan)
        self._count_fillers(len(rows))
        start = [self._policy(row) if self.needs_start else None for row in rows]
        if self.needs_start:
            self._keep_step(self._policy)
        advantages, returns = self._advantages(plan, rows, start)
        prepared = [
            PreparedRow(
                row=row,
                ages=ages_of(row, plan),
                fresh=fresh_of(row, plan),
                advantages=advantages[index],
                shares=self._shares(row, plan),
                start=start[index],
                returns=returns[index] if returns is not None else None,
                reference_logprobs=self._reference(row).logprobs if self._reference else None,
            )
            for index, row in enumerate(rows)
        ]
        if self._reference is not None:
            self._keep_step(self._reference)
        statistic = self._statistic(prepared)
        return [replace(row, statistic=statistic) for row in prepared]

    def _count_fillers(self, num_rows: int) -> None:
        if self._filler is not None:
            counts = self._ranks.gather(np.array([num_rows]))
            self.num_fillers = max(int(count[0]) for count in counts) - num_rows

    def _keep_step(self, model: Reference) -> None:
        """Run the model as often as the rank with the most rows. No rank may gather other data before all have
        done so."""
        if self._filler is not None:
            for _ in range(self.num_fillers):
                model(self._filler)

    def _lay_out(self, plan: StepPlan) -> list[PackedRow]:
        """Pack all rows of the plan. A blob that is lost on one rank stops every rank before anything is
        trained."""
        rows: list[PackedRow | None] = []
        lost: BlobLost | None = None
        try:
            routing = self._routing_shape(plan)
            for micro_batch in plan.micro_batches:
                for sequences in self._cut(micro_batch):
                    rows += self._pack(sequences, plan, routing)
        except BlobLost as error:
            lost = error
        gathered = self._ranks.gather(np.array([lost is not None]))
        if any(bool(part.any()) for part in gathered):
            raise lost or BlobLost("a blob that another rank needs is lost")
        return [row for row in rows if row is not None]

    def _pack(
        self, sequences: Sequence[TrainSequence], plan: StepPlan, routing: RoutingShape | None
    ) -> list[PackedRow | None]:
        """Pack one row, or several if it gets too long: the plan assumes that a group's episodes share their
        prompt, and those that were computed with other experts do not."""
        row = PackedRow.of(
            sequences,
            self._device,
            shared_prompts=self.shares_prompts,
            columns=plan.columns,
            blobs=self._blobs,
            routing=routing,
        )
        if row is None or routing is None or len(sequences) == 1:
            return [row]
        if row.input_ids.shape[1] <= self._config.micro_batch_tokens:
            return [row]
        bins = self._bins(sequences)
        if len(bins) == 1:
            return [row]
        return [part for members in bins for part in self._pack(members, plan, routing)]

    def row_of(self, sequences: Sequence[TrainSequence]) -> PackedRow | None:
        """Pack these sequences into a row, without their recorded experts."""
        return PackedRow.of(sequences, self._device, blobs=self._blobs)

    def _routing_shape(self, plan: StepPlan) -> RoutingShape | None:
        """Return the routing shape of the model, or None if no routes are expected and none have come. With it,
        tokens without a route are counted, even in a step that has no routes at all."""
        refs = [ref for batch in plan.micro_batches for sequence in batch for ref in sequence.sample.routing]
        routers = self._policy.routers
        shape = routers.shape if routers is not None else None
        for ref in refs:
            check_routing(ref, shape)
        return shape if refs or self.expects_routes else None

    def _cut(self, sequences: tuple[TrainSequence, ...]) -> list[list[TrainSequence]]:
        """Cut a micro-batch whose row may be too long, because the plan counts shared prompts once and the model
        can't share them."""
        if self.shares_prompts or not self._config.shared_prompts:
            return [list(sequences)]
        return self._bins(sequences)

    def _bins(self, sequences: Sequence[TrainSequence]) -> list[list[TrainSequence]]:
        """Group sequences that fit into a row, each with its own prompt."""
        lengths = [forward_length(sequence.sample) for sequence in sequences]
        bins = pack(lengths, self._config.micro_batch_tokens)
        return [[sequences[index] for index in members] for members in bins]

    def _advantages(
        self, plan: StepPlan, rows: list[PackedRow], start: list[TokenOutputs | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Return one advantage per token of each row, and the value head's targets if there is one."""
        name, arguments = self._algorithm.advantage, self._algorithm.advantage_args
        if not is_of_tokens(name):
            of_group = ADVANTAGES.bind(name, arguments)(StepFacts.of(plan.scores, plan.num_tokens))
            per_row = [
                np.array([of_group[sequence.group][sequence.episode] for sequence in row.sequences])
                for row in rows
            ]
            return [
                self._tensor(values)[row.segments] for values, row in zip(per_row, rows, strict=True)
            ], None
        sequences = [
            tokens for row, outputs in zip(rows, start, strict=True) for tokens in _token_facts(row, outputs)
        ]
        facts = TokenFacts(scores=plan.scores, sequences=sequences, gather=self._ranks.gather)
        result: TokenAdvantages = TOKEN_ADVANTAGES.bind(name, arguments)(facts)
        advantages = self._by_row(result.advantages, rows)
        return advantages, None if result.returns is None else self._by_row(result.returns, rows)

    def _by_row(self, arrays: list[np.ndarray], rows: list[PackedRow]) -> list[torch.Tensor]:
        ends = np.cumsum([len(row.sequences) for row in rows])
        return [
            self._tensor(np.concatenate(arrays[end - len(row.sequences) : end]))
            for row, end in zip(rows, ends, strict=True)
        ]

    def _shares(self, row: PackedRow, plan: StepPlan) -> torch.Tensor:
        counts = self._tensor(np.array(row.counts))[row.segments]
        match self._algorithm.length_norm:
            case "token":
                return torch.full_like(counts, 1 / plan.num_loss_tokens)
            case "sequence":
                return 1 / (counts * plan.num_sequences)
            case "constant":
                return torch.full_like(counts, 1 / (self._algorithm.length_constant * plan.num_sequences))

    def _statistic(self, rows: list[PreparedRow]) -> float:
        """Compute the whole-step statistic that the loss declares, the same on every rank."""
        statistic = statistic_of(self._algorithm.loss)
        if statistic is None:
            return float("inf")
        proximal = self._algorithm.effective_proximal
        parts = [np.zeros(0, dtype=np.float32)]
        for row in rows:
            assert row.start is not None
            tokens = row.tokens(row.start.logprobs, proximal)
            parts.append(statistic.of_tokens(tokens).float().cpu().numpy())
        whole = np.concatenate(self._ranks.gather(np.concatenate(parts)))
        return statistic.of_step(whole, **self._algorithm.loss_args)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self._device)


def ages_of(row: PackedRow, plan: StepPlan) -> torch.Tensor:
    """Return the age of each loss token, in steps."""
    parts = []
    for sequence, positions in zip(row.sequences, row.positions, strict=True):
        ages = plan.ages[sequence.group]
        first = min(ages)
        by_version = np.zeros(max(ages) - first + 1, dtype=np.float32)
        by_version[np.array(list(ages)) - first] = list(ages.values())
        parts.append(by_version[sequence.sample.versions[positions] - first])
    return torch.from_numpy(np.concatenate(parts)).to(row.input_ids.device)


def fresh_of(row: PackedRow, plan: StepPlan) -> torch.Tensor:
    """Return the tokens on which engine and trainer should agree. An answer in flight may keep keys and values of
    older weights: a token of the current version that has read these was drawn in a context that the trainer does
    not compute. If the engine does not report such tokens, all that follow an older one count as such."""
    parts = []
    for sequence, positions in zip(row.sequences, row.positions, strict=True):
        versions = sequence.sample.versions
        older = (versions != NOT_SAMPLED) & ~np.isin(versions, plan.fresh)
        is_stale = np.cumsum(older) > 0 if sequence.sample.mixed is None else older | sequence.sample.mixed
        parts.append(~is_stale[positions])
    return torch.from_numpy(np.concatenate(parts)).to(row.input_ids.device)


def _token_facts(row: PackedRow, outputs: TokenOutputs | None) -> list[SequenceTokens]:
    """Return the turn and offset of each loss token of a row in its episode, and its value."""
    ends = np.cumsum(row.counts)
    values = None
    if outputs is not None and outputs.values is not None:
        values = outputs.values.cpu().double().numpy()
    facts = []
    for sequence, positions, end in zip(row.sequences, row.positions, ends, strict=True):
        spans = sequence.sample.turns
        turns = np.array([span.turn for span in spans] or [0])
        starts = np.array([span.start for span in spans] or [0])
        which = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
        facts.append(
            SequenceTokens(
                group=sequence.group,
                episode=sequence.episode,
                turns=turns[which],
                offsets=positions - starts[which],
                values=None if values is None else values[end - len(positions) : end],
            )
        )
    return facts
