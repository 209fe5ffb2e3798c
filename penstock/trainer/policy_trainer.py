"""Executes planned optimizer steps on one rank.

    plan ─► packed rows ─► forward ─► loss ─► backward ─► … ─► clip ─► AdamW ─► live weights

The plan's denominators span the whole step, so the gradient is the same for any split into
micro-batches. A new algorithm is a function in `penstock.algorithms`, never another trainer.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.algorithms.config import AlgorithmConfig
from penstock.errors import Diverged
from penstock.interfaces import BlobStore, Ranks
from penstock.models.precision import guard_bfloat16
from penstock.models.published import published_tensors
from penstock.models.saving import save_model
from penstock.models.tokenizer import max_positions
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.clock import StepClock
from penstock.trainer.config import TrainerConfig
from penstock.trainer.dummy_batch import dummy_batch
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.reference_policy import AdapterOff, Reference
from penstock.trainer.forward.value_head import ValueHead
from penstock.trainer.objective import Objective
from penstock.trainer.optimizer import MasterAdamW, learning_rate_at
from penstock.trainer.ranks import SingleRank
from penstock.trainer.step_metrics import StepRecord, mean_of, summarise
from penstock.trainer.step_preparation import Preparation, PreparedRow
from penstock.types import Metric, StepPlan, StepResult, metric_values
from penstock.types.metrics import Max, Shared, Sum

log = logging.getLogger(__name__)


class PolicyTrainer:
    """Owns the model and its optimizer. Synchronous: its process calls it from a thread."""

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
        saved_dtype: torch.dtype | None = None,
    ) -> None:
        """`saved_dtype` is the number format of the checkpoint that the model came from; None: saved as it is. With
        an `adapter` in the model it alone is trained, and the model without it is the reference."""
        if algorithm.kl_coef > 0 and reference is None and adapter is None:
            raise ValueError("kl_coef > 0 needs a reference model; pass reference= or set kl_coef to 0")
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.dtype == "bfloat16":
            guard_bfloat16(device)
        self._config, self._total_steps = config, total_steps
        self._ranks: Ranks = ranks or SingleRank()
        self._device = device
        self._saved_dtype = saved_dtype
        self._adapter = adapter
        self._model: Any = model.to(device)
        self._value_head = _value_head(self._model).to(device) if algorithm.needs_values else None
        extra = [] if self._value_head is None else list(self._value_head.parameters())
        self._optimizer = MasterAdamW(model, config, extra)
        policy = self._policy = PackedModel(
            model,
            chunk_tokens=config.logprob_chunk_tokens,
            checkpointing=config.checkpointing,
            compiled=config.compile == "on",
            value_head=self._value_head,
        )
        frozen: Reference | None = None
        self._without_adapter: AdapterOff | None = None
        if reference is not None:
            reference.to(device=device).requires_grad_(False)
            frozen = PackedModel(
                reference, chunk_tokens=config.logprob_chunk_tokens, replays_routing=config.replay_reference
            )
        elif adapter is not None and algorithm.needs_reference:
            frozen = self._without_adapter = AdapterOff(
                policy, adapter, replays_routing=config.replay_reference
            )
        self._prepare = Preparation(
            policy, frozen, algorithm, config=config, device=device, blobs=blobs, ranks=self._ranks
        )
        self._objective = Objective(policy, algorithm)
        self._num_updates = 0
        self._num_skipped = 0
        self._num_skipped_in_a_row = 0
        self._num_gap_warnings = 0

    def warm_up(self) -> None:
        """Compile with a dummy batch what the usual row will run, if compilation is on. Weights do not change. Rows
        without a shared prompt and 8-bit updates are compiled when the first one comes."""
        if self._config.compile != "on":
            return
        row = dummy_batch(
            self._model.get_input_embeddings().num_embeddings,
            self._config.micro_batch_tokens,
            self._device,
            longest=max_positions(self._model.config),
            shared_prompts=self._prepare.lays_once,
        )
        with torch.no_grad():
            if self._prepare.needs_start:
                self._policy(row)
            if self._without_adapter is not None:
                self._without_adapter(row)
        self._policy(row).logprobs.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.forget()

    def step(self, plan: StepPlan) -> StepResult:
        """Run a plan: every pass ends in one optimizer update, or in none when it is not finite."""
        clock = StepClock(self._device)
        with clock.host("prepare"):
            rows = self._prepare(plan)
            routing_gaps = self._routing_gaps(plan)
        metrics: dict[str, Metric] = {}
        for index in range(self._config.passes):
            record = self._accumulate(rows, clock)
            with clock.device("optimizer"):
                update = self._update(plan.step, record.loss)
            if index == 0:
                with clock.host("metrics"):
                    metrics = summarise(record, plan)
                    shared = sum(row.row.num_shared_tokens for row in rows)
                    metrics["prompt_tokens_shared"] = Sum(value=float(shared))
                metrics |= routing_gaps
                self._watch_gap(metric_values(metrics), plan.step)
                metrics["logprob_gap_warnings"] = Max(value=float(self._num_gap_warnings))
            metrics |= update
        return StepResult(step=plan.step, metrics=metrics, seconds=clock.seconds())

    def starting_weights(self) -> list[Mapping[str, torch.Tensor]]:
        """What engines need before the first step, in order: of an adapter, the weights below it first."""
        below = [] if self._adapter is None else [self._adapter.base_tensors()]
        return [*below, self.weights()]

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What a step changes, as engines name it: live parameters and persistent buffers, or the adapter's."""
        if self._adapter is not None:
            return self._adapter.tensors()
        return {name: tensor.detach() for name, tensor in published_tensors(self._model).items()}

    def save(self, folder: str | Path) -> None:
        """Write the model in Hugging Face format, in the number format that it came in; an adapter in peft's."""
        if self._adapter is not None:
            self._adapter.save(Path(folder))
            return
        save_model(self._model, Path(folder), self._saved_dtype)

    def state_dict(self) -> dict[str, Any]:
        """All that a later process needs to go on as if it were this one. Its tensors are the live ones."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self._num_updates,
            "num_skipped": self._num_skipped,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
            "num_gap_warnings": self._num_gap_warnings,
            "random": random_states(self._device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_updates = state["num_updates"]
        self._num_skipped = state["num_skipped"]
        self._num_skipped_in_a_row = state["num_skipped_in_a_row"]
        self._num_gap_warnings = state["num_gap_warnings"]
        restore_random_states(self._device, state["random"])

    def _accumulate(self, rows: list[PreparedRow], clock: StepClock) -> StepRecord:
        """The host does not wait for the GPU before the last micro-batch is queued, so the GPU never runs out of
        work in between."""
        record = StepRecord()
        for row in rows:
            with clock.device("forward"):
                result = self._objective(row)
            with clock.device("backward"):
                result.loss.backward()  # type: ignore[no-untyped-call]
            record.add(result.loss, result.columns, result.routing)
        record.fetch()
        return record

    @torch.no_grad()
    def _routing_gaps(self, plan: StepPlan) -> dict[str, Metric]:
        """|Δ logprob| between engine and trainer on one sequence, with its experts replayed and chosen anew."""
        row = self._prepare.routing_sample(plan)
        if row is None:
            return {}
        gaps = {
            name: (self._policy(row, replays_routing=replays).logprobs - row.behaviour_logprobs).abs()
            for name, replays in (("routing_gap", True), ("routing_gap_without", False))
        }
        return {name: mean_of(gap.cpu()) for name, gap in gaps.items()}

    def _watch_gap(self, metrics: dict[str, float], step: int) -> None:
        """Count steps whose training–inference gap is too wide; say so the first and every 100th time."""
        gap, limit = metrics.get("logprob_gap_mean", 0.0), self._config.logprob_gap_warning
        if gap > limit:
            if self._num_gap_warnings % 100 == 0:
                log.warning(
                    "step %d: the engine's and the trainer's logprobs of the same weights differ by %.3g on "
                    "average (at most %.3g; the limit is %.3g). Look at: the dtypes of engine and trainer, "
                    "top-k/top-p/min-p without recorded sampling masks, penalties or logit bias in the "
                    "sampling, and whether the weights' fingerprints are verified",
                    step,
                    gap,
                    metrics["logprob_gap_max"],
                    limit,
                )
            self._num_gap_warnings += 1

    def _update(self, step: int, loss: float) -> dict[str, Metric]:
        """Update the weights, unless the loss or the gradient is not finite on any rank."""
        loss = float(sum(part.sum() for part in self._ranks.gather(np.array([loss]))))
        self._optimizer.sum_gradients(self._ranks)
        norm = self._optimizer.gradient_norm()
        learning_rate = learning_rate_at(step, self._total_steps, self._config)
        if math.isfinite(loss) and math.isfinite(norm):
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
                    "weights are still those before them. Lower trainer.learning_rate; "
                    "trainer.max_skipped_updates sets how many are too many"
                )
        return {
            "grad_norm": Shared(value=norm),
            "learning_rate": Shared(value=learning_rate),
            "skipped_updates": Shared(value=float(self._num_skipped)),
        }


def random_states(device: str) -> dict[str, torch.Tensor]:
    """Of the generators that a process has by default."""
    states = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(device: str, states: Mapping[str, torch.Tensor]) -> None:
    """A GPU's numbers go on where the state was of one too; elsewhere fresh ones are as random."""
    torch.set_rng_state(states["cpu"])
    if torch.device(device).type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _value_head(model: Any) -> ValueHead:
    return ValueHead(model.get_input_embeddings().embedding_dim)
