"""Computes logprobs and entropy of given tokens from hidden states, in chunks, so that the full logits never exist.

Only rows that predict a token of the loss are projected. Forward keeps nothing of vocabulary size, except the last
chunk when it is the only one. Backward projects again, chunk by chunk, and adds up the gradient of the output
embedding in place. On a GPU the logits of a chunk come from a half-precision matmul with float32 output, and Triton
kernels read them once in each direction.

An adapter on the output embedding widens the operands of that matmul. So nothing is rounded that the layer itself
would not round:

    states · Wᵀ + scale · (states · Aᵀ) · Bᵀ  =  [states, scale · states · Aᵀ] · [W, B]ᵀ
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.models.compilation import has_triton
from penstock.models.precision import HALF_TYPES, float32_matmul
from penstock.models.transfer import upload
from penstock.trainer.forward.split_vocabulary import ELSEWHERE, VocabularyPart, own_vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptIds:
    """Holds the ids that truncated sampling kept, in CSR form: row i kept `ids[offsets[i]:offsets[i+1]]`; an
    empty row kept everything."""

    offsets: torch.Tensor
    """In host memory: sizes are read from it, which would wait for a device."""
    ids: torch.Tensor
    are_local: bool = False
    """Whether `ids` are counted within a rank's part of the vocabulary (`split_vocabulary.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitShape:
    """Applies what a model does to its logits after the projection: a scale, then a soft-cap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitShape":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier"):
            scale *= getattr(text, name, None) or 1.0
        scale /= getattr(text, "logits_scaling", None) or 1.0
        return cls(scale=scale, softcap=getattr(text, "final_logit_softcapping", None))

    def apply(self, raw: torch.Tensor) -> torch.Tensor:
        logits = raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def grad_(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Convert the gradient of the shaped logits into that of the raw ones, in place."""
        if self.softcap is not None:
            grad *= 1 - (logits / self.softcap) ** 2
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


class TokenHead:
    """Turns one packed row into logprobs of its target tokens, for any causal LM.

    `states` runs the model up to the last hidden states; calling the head projects chosen rows of them. If
    the head can't reproduce the model's own logits on a few tokens, it uses the model's full logits instead,
    and logs a warning.
    """

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
        self.model: Any = model
        self._chunk = chunk_tokens
        self._shape = LogitShape.of(self.model.config)
        self._full_logits = False
        self._fused: bool | None = None

    @property
    def uses_full_logits(self) -> bool:
        return self._full_logits

    def states(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return (tokens, width) for a (1, tokens) row: hidden states, or logits in the fallback."""
        row = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self._full_logits:
            return self.model(**row).logits[0]  # type: ignore[no-any-return]
        return self.model.base_model(**row).last_hidden_state[0]  # type: ignore[no-any-return]

    def __call__(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        kept: KeptIds | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprob of each target and the entropy of its distribution, both (rows,) and differentiable.
        The distribution is the one that was sampled from: at its temperature, over the kept ids alone."""
        part: VocabularyPart | None = None
        if self._full_logits:
            weight, bias, shape = None, None, LogitShape()
        else:
            embedding = self.model.get_output_embeddings()
            states, whole = head_of(embedding, states)
            weight, part = own_vocabulary(whole)
            bias, shape = getattr(embedding, "bias", None), self._shape
        if part is not None:
            targets = part.local(targets)
            bias = None if bias is None else own_vocabulary(bias)[0]
            kept = kept and KeptIds(offsets=kept.offsets, ids=part.local(kept.ids), are_local=True)
        fused = self._fused if self._fused is not None else states.is_cuda and has_triton()
        head = Projection(kept=kept, shape=shape, chunk=self._chunk, fused=fused, vocabulary=part)
        return _Logprobs.apply(states, weight, bias, targets, temperature, head)  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def verify(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Compare with the model's own logits on this row; fall back to them when they differ."""
        own = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits[0].float()
        try:
            states = self.states(input_ids, position_ids)
            embedding = self.model.get_output_embeddings()
            ours = self._shape.apply(embedding(states))
            worst = float((ours - own).abs().max()) if ours.shape == own.shape else float("inf")
        except (AttributeError, TypeError) as error:
            worst, reason = float("inf"), f" ({error})"
        else:
            reason = ""
        tolerance = 1e-4 if own.dtype == torch.float32 and states_dtype(self.model) == torch.float32 else 2e-2
        if not worst <= tolerance * max(1.0, float(own.abs().max())):
            self._full_logits = True
            log.warning(
                "logprobs of %s are computed from its full logits: the chunked head differs by %.3g%s",
                type(self.model).__name__,
                worst,
                reason,
            )


def states_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that the model computes in: that of its first parameter."""
    return next(model.parameters()).dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Holds what is the same for all chunks of a projection, and needs no gradient."""

    kept: KeptIds | None
    shape: LogitShape
    chunk: int
    fused: bool
    """Whether the Triton kernels compute statistics and gradients."""
    vocabulary: VocabularyPart | None

    def chunks(self, rows: int) -> Iterator[slice]:
        return (slice(start, min(start + self.chunk, rows)) for start in range(0, rows, self.chunk))

    def prepare(self, raw: torch.Tensor, temperature: torch.Tensor, part: slice) -> torch.Tensor:
        """Return what gradients are made from: the raw logits for the kernels, else the shaped logits over their
        temperature. Ids that truncation cut become minus infinity."""
        logits = raw if self.fused else self.shape.apply(raw) / temperature[:, None]
        return logits if self.kept is None else _restrict(logits, self.kept, part.start, part.stop)

    def normalise(
        self, raw: torch.Tensor, temperature: torch.Tensor, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a chunk's prepared logits, the logs of their normalisers, and their entropies."""
        logits = self.prepare(raw, temperature, part)
        if self.fused:
            from penstock.trainer.forward.logprob_kernel import statistics

            scale, softcap = self.shape.scale, self.shape.softcap
            return logits, *statistics(logits, temperature, scale=scale, softcap=softcap)
        lse = logits.logsumexp(dim=-1)
        probs = (logits - lse[:, None]).exp_()
        return logits, lse, lse - (probs * logits).nan_to_num_(nan=0.0).sum(dim=-1)

    def gradient(self, logits: torch.Tensor, rows: "_Rows", dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of one chunk's raw logits, from its prepared ones."""
        if self.fused:
            from penstock.trainer.forward.logprob_kernel import gradient

            scale, softcap = self.shape.scale, self.shape.softcap
            return gradient(logits, *rows, dtype=dtype, scale=scale, softcap=softcap)
        return _gradient(logits, rows, self.shape).to(dtype)


class _Rows(NamedTuple):
    """Holds what backward needs of the rows of a chunk beside their logits."""

    targets: torch.Tensor
    temperature: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor | None

    def of(self, part: slice) -> "_Rows":
        return _Rows(*(None if each is None else each[part] for each in self))  # type: ignore[arg-type]


class _Logprobs(torch.autograd.Function):
    """Projects, shapes, divides by the temperature, restricts and normalises, with a hand-written backward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        head: Projection,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = states.shape[0]
        lse, chosen, entropy = (torch.empty(rows, device=states.device) for _ in range(3))
        logits = None
        for part in head.chunks(rows):
            raw = _project(states[part], weight, bias)
            chosen[part] = _chosen(raw, targets[part], head.shape) / temperature[part]
            logits, lse[part], entropy[part] = head.normalise(raw, temperature[part], part)
            # Without this, a chunk would stay in memory while the next one is made.
            del raw
            logits = logits if rows <= head.chunk else None
        if head.vocabulary is not None:
            lse, entropy, chosen = head.vocabulary.join(lse, entropy, chosen)
        ctx.save_for_backward(states, weight, bias, targets, temperature, lse, entropy, logits)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        states, weight, bias, targets, temperature, lse, entropy, saved = ctx.saved_tensors
        head: Projection = ctx.head
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        rows = _Rows(targets, temperature, lse, entropy, grad_logprobs, grad_entropy)
        grad_states = torch.empty_like(states)
        # An embedding that is not trained (under an adapter) gets no gradient: it would be the largest tensor.
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if trains_bias else None
        for part in head.chunks(states.shape[0]):
            logits = saved
            if logits is None:
                logits = head.prepare(_project(states[part], weight, bias), temperature[part], part)
            grad = head.gradient(logits, rows.of(part), states.dtype)
            del logits
            if weight is None:
                grad_states[part] = grad
                continue
            torch.mm(grad, weight, out=grad_states[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, states[part])
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=torch.float32)
            del grad
        return (
            grad_states if head.vocabulary is None else head.vocabulary.sum(grad_states),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 3,
        )


def _chosen(raw: torch.Tensor, targets: torch.Tensor, shape: LogitShape) -> torch.Tensor:
    """Return the shaped logits of the targets, zero for targets that another rank has."""
    logits = shape.apply(raw.gather(1, targets.clamp_min(0)[:, None]))[:, 0]
    return torch.where(targets == ELSEWHERE, 0.0, logits)


def _project(states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Return raw logits in a new tensor. On a GPU a half-precision matmul accumulates and returns float32."""
    if weight is None:
        return states.clone(memory_format=torch.contiguous_format)
    if not _sums_in_float32(states):
        return torch.nn.functional.linear(states, weight, bias)
    return float32_matmul(states, weight, bias)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, in float32."""
    if _sums_in_float32(right):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _sums_in_float32(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in HALF_TYPES


def _gradient(scaled: torch.Tensor, rows: _Rows, shape: LogitShape) -> torch.Tensor:
    logp = scaled - rows.lse[:, None]
    probs = logp.exp()
    grad = probs * -rows.grad_logprobs[:, None]
    if rows.grad_entropy is not None:
        inner = (probs * (logp + rows.entropy[:, None])).nan_to_num_(nan=0.0)
        grad -= inner * rows.grad_entropy[:, None]
    index = torch.arange(grad.shape[0], device=grad.device)
    grad[index, rows.targets.clamp_min(0)] += torch.where(rows.targets == ELSEWHERE, 0.0, rows.grad_logprobs)
    grad /= rows.temperature[:, None]
    if not shape.softcap:
        return shape.grad_(grad, scaled)
    return shape.grad_(grad, (scaled * rows.temperature[:, None]).nan_to_num_(neginf=0.0))


def _restrict(scaled: torch.Tensor, kept: KeptIds, start: int, stop: int) -> torch.Tensor:
    """Set logits outside the kept ids to minus infinity, in place, for the rows that were truncated."""
    offsets = kept.offsets[start : stop + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return scaled
    ids = kept.ids[first:last]
    counts = upload(offsets.diff().numpy(), scaled.device)
    rows = torch.arange(stop - start, device=scaled.device).repeat_interleave(
        counts, output_size=last - first
    )
    if kept.are_local:
        own = ids != ELSEWHERE
        rows, ids = rows[own], ids[own]
    values = scaled[rows, ids]
    scaled.masked_fill_(counts[:, None] > 0, float("-inf"))
    scaled[rows, ids] = values
    return scaled


def head_of(embedding: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and weights whose product is the output embedding's result for `states`, with its adapter if
    it has one."""
    weight: torch.Tensor = embedding.weight
    if getattr(embedding, "disable_adapters", True):
        return states, weight
    (name,) = embedding.active_adapters
    a, b, scale = embedding.lora_A[name], embedding.lora_B[name].weight, embedding.scaling[name]
    wider = torch.cat([states, scale * a(embedding.lora_dropout[name](states))], dim=1)
    joined = torch.cat([weight, b], dim=1)
    if name in embedding.lora_magnitude_vector:
        lengths = torch.linalg.norm(weight + scale * (b @ a.weight), dim=1).detach()
        joined = joined * (embedding.lora_magnitude_vector[name].weight / lengths)[:, None]
    return wider, joined
