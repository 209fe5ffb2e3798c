"""Executes planned optimizer steps on one rank.

    plan ─► packed rows ─► forward ─► loss ─► backward ─► … ─► clip ─► AdamW ─► live weights

The plan's denominators span the whole step, so the gradient is the same for any split into micro-batches. A
new algorithm is a function in `penstock.algorithms`, never another trainer.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from penstock.algorithms.config import AlgorithmConfig
from penstock.checksums import Checksum
from penstock.errors import Diverged
from penstock.models.precision import guard_bfloat16
from penstock.models.tokenizer import max_positions
from penstock.records import Metric, StepPlan, StepResult, TracedTokens, TrainSequence, merge_metrics
from penstock.records.interfaces import BlobStore, Ranks
from penstock.records.metrics import Max, Shared, Sum
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.checkpoint.checkpoint_state import (
    CheckpointState,
    random_states,
    restore_random_states,
    take_state,
)
from penstock.trainer.checkpoint.host_copies import Copies, HostCopier
from penstock.trainer.checkpoint.state_files import write_state
from penstock.trainer.config import TrainerConfig
from penstock.trainer.fixed_buffers import FixedBuffers
from penstock.trainer.forward.dummy_batch import dummy_batch, filler
from penstock.trainer.forward.packed_model import PackedModel, TokenOutputs, release_gathered
from penstock.trainer.forward.reference_policy import AdapterOff
from penstock.trainer.forward.value_head import ValueHead
from penstock.trainer.optimizers.optimizer import MasterAdamW, learning_rate_at
from penstock.trainer.parallel.ranked_state import load_ranked, write_ranked
from penstock.trainer.parallel.ranks import RankRoles
from penstock.trainer.step.clock import StepClock
from penstock.trainer.step.objective import Objective
from penstock.trainer.step.routing_sample import choose_sample, routing_gaps
from penstock.trainer.step.step_metrics import (
    GapWatch,
    StepRecord,
    of_last_pass,
    of_pass,
    summarise,
    trace_tokens,
)
from penstock.trainer.step.step_preparation import Preparation, PreparedRow
from penstock.trainer.trained_weights import TrainedWeights

if TYPE_CHECKING:
    from penstock.trainer.parallel.process_ranks import GroupRanks, ProcessRanks

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
"""The part of a step in which its update waits for the copies of a checkpoint."""


class PolicyTrainer:
    """Owns the model and its optimizer. It is synchronous: its process calls it from a thread."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        total_steps: int,
        reference: nn.Module | None = None,
        adapter: TrainedAdapter | None = None,
        device: str = "cpu",
        blobs: BlobStore | None = None,
        ranks: Ranks | None = None,
        parallel: "ProcessRanks | None" = None,
        saved_dtype: torch.dtype | None = None,
    ) -> None:
        """`parallel` are the processes that train with this one. `saved_dtype` is the number format of the
        checkpoint that the model came from; None saves the weights as they are. If the model has an
        `adapter`, only the adapter is trained, and the model without it is the reference."""
        if algorithm.kl_coef > 0 and reference is None and adapter is None:
            raise ValueError("kl_coef > 0 needs a reference model; pass reference= or set kl_coef to 0")
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.dtype == "bfloat16":
            guard_bfloat16(device)
        self._config, self._total_steps = config, total_steps
        self._ranks = RankRoles.of(ranks, parallel)
        self._device = device
        is_split = self._ranks.is_split
        self._model: Any = model if is_split else model.to(device)
        self.trained = TrainedWeights(
            self._model,
            adapter,
            saved_dtype=saved_dtype,
            layout=self._ranks.layout,
            ranks=self._ranks.checkpoints,
        )
        self._value_head = _value_head(self._model).to(device) if algorithm.needs_values else None
        extra = [] if self._value_head is None else list(self._value_head.parameters())
        if not is_split:  # rounds the weights to `trainer.dtype` before the packed model is made
            self._optimizer = MasterAdamW(model, config, extra)
        policy = self._policy = PackedModel(
            model,
            chunk_tokens=config.logprob_chunk_tokens,
            checkpointing=config.checkpointing,
            compiled=config.compile == "on",
            value_head=self._value_head,
        )
        self._ranks.split(policy, config, device)
        if is_split:
            self._optimizer = MasterAdamW(model, config, extra, layout=self._ranks.layout)
        self._buffers = FixedBuffers(model)
        self._reference = self._open_reference(reference, adapter if algorithm.needs_reference else None)
        self._filler = filler(self._model, self._device) if is_split else None
        self._prepare = Preparation(
            policy,
            self._reference,
            algorithm,
            config=config,
            device=device,
            blobs=blobs,
            ranks=self._ranks.data,
            filler=self._filler,
        )
        self._objective = Objective(policy, algorithm)
        self._copier = HostCopier()
        self._copies: Copies | None = None
        """The copies of a checkpoint that was taken since the last update."""
        self._taking_s: float | None = None
        """How long taking that checkpoint held up the trainer; None if there was none."""
        self._is_changed = False
        """Whether the present step has begun to change the weights."""
        self._num_updates = 0
        self._num_skipped = 0
        self._num_skipped_in_a_row = 0
        self._gaps = GapWatch(config.logprob_gap_warning)

    def _open_reference(
        self, model: nn.Module | None, adapter: TrainedAdapter | None
    ) -> PackedModel | AdapterOff | None:
        """Return the reference of a KL penalty: a second model, or the policy's own without its adapter."""
        config = self._config
        if model is not None:
            model.to(device="cpu" if self._ranks.is_split else self._device).requires_grad_(False)
            frozen = PackedModel(
                model, chunk_tokens=config.logprob_chunk_tokens, replays_routing=config.replay_reference
            )
            self._ranks.split(frozen, config, self._device)
            return frozen
        if adapter is not None:
            return AdapterOff(self._policy, adapter, replays_routing=config.replay_reference)
        return None

    def warm_up(self) -> None:
        """Compile the code that the usual row will run, with a dummy batch, if compilation is on. Weights do not
        change. Rows without a shared prompt and 8-bit updates are compiled when the first one comes."""
        if self._config.compile != "on":
            return
        self._policy.expect_routes()
        row = dummy_batch(
            self._model.get_input_embeddings().num_embeddings,
            self._config.micro_batch_tokens,
            self._device,
            longest=max_positions(self._model.config),
            shared_prompts=self._prepare.shares_prompts,
        )
        with torch.no_grad():
            if self._prepare.needs_start:
                self._policy(row)
            if isinstance(self._reference, AdapterOff):
                self._reference(row)
        self._policy(row).logprobs.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.forget()

    def expect_routes(self) -> None:
        """Prepare for a run that records experts: tokens without a record are counted. Refuse a model that can't
        replay them."""
        self._policy.require_routers()
        self._prepare.expects_routes = True

    def step(self, plan: StepPlan) -> StepResult:
        """Run a plan. Every pass ends in one optimizer update, or in none if its loss or gradient is not finite."""
        self._is_changed = False
        clock = StepClock(self._device)
        with clock.host("prepare"):
            rows = self._prepare(plan)
            if self._filler is not None and isinstance(self._reference, PackedModel):
                release_gathered(self._reference.model)  # a backward pass would do this
            sample = choose_sample(sequence for batch in plan.micro_batches for sequence in batch)
        metrics: dict[str, Metric] = {}
        traces: tuple[TracedTokens, ...] = ()
        passes, norms, num_passes = list[dict[str, Metric]](), list[float](), self._config.passes
        for index in range(num_passes):
            record = self._accumulate(rows, clock, sample if index == 0 else None)
            if self._copies is not None:
                with clock.device(CHECKPOINT):
                    self._copies.wait_before_update()
                self._copies = None
            if self._filler is not None:
                release_gathered(self._model)
            with clock.device("optimizer"):
                norms.append(self._update(plan.step, record.loss))
            if index == 0:
                with clock.host("metrics"):
                    metrics = summarise(record, plan)
                    shared = sum(row.row.num_shared_tokens for row in rows)
                    metrics["prompt_tokens_shared"] = Sum(value=float(shared))
                    traces = trace_tokens(record, rows, plan)
                    metrics |= routing_gaps(record, rows, sample)
                self._gaps.see(metrics, plan.step, self._ranks.data)
                metrics["logprob_gap_warnings"] = Max(value=float(self._gaps.num_warnings))
            with clock.host("metrics"):
                passes.append(of_pass(record, num_passes))
                if 0 < index == num_passes - 1:
                    metrics |= of_last_pass(record)
        metrics |= merge_metrics(passes) | self._update_facts(plan.step, norms)
        seconds = clock.seconds()
        waited_s = seconds.pop(CHECKPOINT, 0.0)
        if self._taking_s is not None:
            metrics["checkpoint_stall_ms"] = Max(value=1e3 * (self._taking_s + waited_s))
            self._taking_s = None
        own = tuple(name for name in record.own_columns if name in metrics)
        return StepResult(step=plan.step, metrics=metrics, seconds=seconds, traces=traces, own_metrics=own)

    def undo_step(self) -> bool:
        """Drop what a failed step has computed. Return False if it has changed weights already."""
        self._optimizer.forget()
        if self._filler is not None:
            release_gathered(self._model)
        return not self._is_changed

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the live weights that a step changes, as engines name them."""
        return self.trained.weights()

    def save(self, folder: str | Path) -> dict[Path, Checksum]:
        """Write the model in Hugging Face format, or the adapter in peft's; every rank must call it. Returns the
        checksums that were computed while writing."""
        return self.trained.save(Path(folder))

    @property
    def checkpoint_ranks(self) -> "GroupRanks | None":
        """Return the ranks that write checkpoints with this one."""
        return self._ranks.checkpoints

    def checkpoint_state(self) -> CheckpointState:
        """Take everything that a checkpoint holds, as it is now. Its copies are made while the next step
        computes, and only the update of that step waits for them."""
        begin = time.perf_counter()
        state = take_state(self._copier, self.state_dict(), self.trained.own_saved())
        self._copies = state.copies
        self._taking_s = time.perf_counter() - begin
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return what another process needs to continue this training exactly: master weights, optimizer,
        counters, random states. The tensors are not copied."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self._num_updates,
            "num_skipped": self._num_skipped,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
            "num_gap_warnings": self._gaps.num_warnings,
            "random": random_states(self._device),
        }

    def write_state(self, folder: Path, state: CheckpointState) -> dict[Path, Checksum]:
        """Write the trainer's part of a checkpoint; each rank writes its own. Return the checksums of its files."""
        layout = self._ranks.layout
        if layout is None:
            return write_state(folder, state.plain, state.tensors)
        return write_ranked(folder, layout, state.plain, state.tensors, self._optimizer.shards(layout))

    def load_state(self, folder: Path) -> None:
        """Load the state that any number of ranks wrote."""
        layout = self._ranks.layout
        shards, order = self._optimizer.shards(layout), self._optimizer.update_order()
        self.load_state_dict(load_ranked(folder, layout, shards, order))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._buffers.remember()
        self._num_updates = state["num_updates"]
        self._num_skipped = state["num_skipped"]
        self._num_skipped_in_a_row = state["num_skipped_in_a_row"]
        self._gaps.num_warnings = state["num_gap_warnings"]
        restore_random_states(self._device, state["random"])

    def _accumulate(
        self, rows: list[PreparedRow], clock: StepClock, sample: Sequence[TrainSequence] | None
    ) -> StepRecord:
        """Run forward and backward of all rows. The host does not wait for the GPU before the last micro-batch
        is queued, so the GPU never runs out of work in between. `sample` is computed once more, without
        replay."""
        record = StepRecord()
        for row in rows:
            with clock.device("forward"):
                result = self._objective(row)
            with clock.device("backward"):
                result.loss.backward()  # type: ignore[no-untyped-call]
            record.add(result.loss, result.columns, result.routing)
            record.own_columns = result.own_columns
        if self._filler is not None:
            for _ in range(self._prepare.num_fillers):
                outputs = self._policy(self._filler)
                (0.0 * everything(outputs)).backward()  # type: ignore[no-untyped-call]
        if sample is not None:
            with clock.device("metrics"):
                record.gap_without_replay = self._gap_without_replay(sample)
        record.fetch()
        self._buffers.check()
        return record

    @torch.no_grad()
    def _gap_without_replay(self, sample: Sequence[TrainSequence]) -> torch.Tensor | None:
        """Return |Δ logprob| between engine and trainer of a few sequences, with the live routers' experts."""
        row = self._prepare.row_of(sample)
        if self._filler is not None:  # either all ranks run a split model, or none
            gathered = self._ranks.data.gather(np.array([row is not None]))
            if row is None and any(bool(part.any()) for part in gathered):
                self._policy(self._filler)
        if row is None:
            return None
        self._policy.expect_routes()
        return (self._policy(row).logprobs - row.behaviour_logprobs).abs()

    def _update(self, step: int, loss: float) -> float:
        """Update the weights, unless the loss or the gradient is not finite on any rank. Return the gradient's
        norm."""
        loss = float(sum(part.sum() for part in self._ranks.data.gather(np.array([loss]))))
        self._optimizer.sum_gradients(self._ranks.gradients)
        norm = self._optimizer.gradient_norm(self._ranks.world)
        learning_rate = learning_rate_at(step, self._total_steps, self._config)
        if math.isfinite(loss) and math.isfinite(norm):
            self._is_changed = True
            self._optimizer.update(learning_rate, norm)
            self._num_updates += 1
            self._num_skipped_in_a_row = 0
        else:
            self._optimizer.forget()
            self._num_skipped += 1
            self._num_skipped_in_a_row += 1
            log.warning("step %d skipped: loss %g, gradient norm %g; weights are unchanged", step, loss, norm)
            if self._num_skipped_in_a_row >= self._config.max_skipped_updates:
                raise Diverged(
                    f"training has diverged: the last {self._num_skipped_in_a_row} updates were skipped, since "
                    f"loss or gradient was not finite (step {step}: loss {loss:g}, gradient norm {norm:g}); the "
                    "weights are unchanged. Lower trainer.learning_rate; "
                    "trainer.max_skipped_updates sets how many are too many"
                )
        return norm

    def _update_facts(self, step: int, norms: list[float]) -> dict[str, Metric]:
        return {
            "grad_norm": Shared(value=sum(norms) / len(norms)),
            "learning_rate": Shared(value=learning_rate_at(step, self._total_steps, self._config)),
            "skipped_updates": Shared(value=float(self._num_skipped)),
        }


def everything(outputs: TokenOutputs) -> torch.Tensor:
    """Sum all outputs of a forward pass, so that a backward pass from it reaches every weight."""
    total = outputs.logprobs.sum() + outputs.entropy.sum()
    return total if outputs.values is None else total + outputs.values.sum()


def _value_head(model: Any) -> ValueHead:
    return ValueHead(model.get_input_embeddings().embedding_dim)
