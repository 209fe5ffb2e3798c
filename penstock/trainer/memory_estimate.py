"""Estimates how much memory a trainer will need, before anything is loaded.

Weights, gradients, masters and moments are exact; activations are those of a Llama-like layer, and rough for
others. Not counted: the CUDA context, fragmentation, the snapshots that a weight sync keeps.
"""

from dataclasses import dataclass

from penstock.models.outline import Outline
from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizers.eightbit_adamw import BLOCK, CHUNK_VALUES
from penstock.trainer.optimizers.host_adamw import BUCKET_VALUES

FLOAT_BYTES = 4
CODED_BYTES = 2 * (1 + FLOAT_BYTES / BLOCK)
"""Both moments of a value in 8 bits, with their share of the scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Holds bytes by purpose, in device memory unless named otherwise."""

    weights: int
    gradients: int
    masters: int
    moments: int
    reference: int
    """A frozen model beside the policy, for a KL penalty; with an adapter the base model itself serves."""
    activations: int
    """Activations that forward keeps for the backward of one micro-batch."""
    head: int
    """A chunk of logits with its gradient, and the gradient of the output embedding where that is trained."""
    layer: int
    """Temporary memory of one layer's backward."""
    update: int
    """Temporary memory of an optimizer update."""
    loading: int
    """The peak before the first step: float32 weights, from which masters are made. Frozen weights (under an
    adapter) are loaded in the dtype they compute in."""
    host: int
    """Bytes in host memory."""

    @property
    def resident(self) -> int:
        """Return what is held all the time. Gradients count, since a step of several micro-batches accumulates
        them."""
        return self.weights + self.gradients + self.masters + self.moments + self.reference

    @property
    def total(self) -> int:
        """Return the peak. The head, a layer and the update need their memory at different times."""
        step = self.activations + max(self.head, self.layer)
        return max(self.resident + max(step, self.update), self.loading)


def estimate_bytes(
    outline: Outline,
    config: TrainerConfig,
    *,
    tokens: int | None = None,
    reference: bool = False,
    on_gpu: bool = True,
) -> MemoryEstimate:
    """Estimate what training a model takes. `tokens` is the longest row: a sequence that is longer than
    `micro_batch_tokens` gets a row of its own."""
    tokens = config.micro_batch_tokens if tokens is None else tokens
    width = 2 if config.dtype == "bfloat16" else FLOAT_BYTES
    on_host = config.optimizer_states == "cpu" and on_gpu
    is_adapter = outline.num_adapter_parameters > 0
    num_weights = outline.num_parameters + outline.num_adapter_parameters
    trained = FLOAT_BYTES * outline.num_trained
    masters = trained if config.dtype == "bfloat16" else 0
    moments = 2 * trained
    if config.optimizer_states == "8bit":
        moments = round(CODED_BYTES * outline.num_trained)
    frozen = FLOAT_BYTES * outline.num_parameters if reference and not is_adapter else 0
    loaded = (width if is_adapter else FLOAT_BYTES) * num_weights
    # Staging on the host: two buckets of gradients and two of weights.
    staging = 2 * BUCKET_VALUES * (FLOAT_BYTES + width)
    return MemoryEstimate(
        weights=width * num_weights,
        gradients=trained,
        masters=0 if on_host else masters,
        moments=0 if on_host else moments,
        reference=frozen,
        activations=tokens * outline.num_layers * width * _kept_values(outline, config.checkpointing),
        head=_head_bytes(outline, min(tokens, config.logprob_chunk_tokens), tokens, width, on_gpu),
        layer=0 if config.checkpointing == "off" else tokens * width * _layer_values(outline),
        update=10 * FLOAT_BYTES * CHUNK_VALUES if config.optimizer_states == "8bit" else 0,
        loading=loaded + (0 if on_host else masters) + frozen,
        host=trained + moments + staging if on_host else 0,
    )


def _kept_values(outline: Outline, checkpointing: str) -> int:
    """Return how many values a layer keeps for every token."""
    match checkpointing:
        case "full":
            return outline.hidden
        case "selective":
            # Its input, queries, attention, their projection, and one of the two wide matmuls of the MLP.
            return 2 * outline.hidden + 2 * outline.queries + outline.intermediate
    return _layer_values(outline)


def _layer_values(outline: Outline) -> int:
    """Count all values of a layer: two norms that compute in float32, queries and keys before and after rotation,
    values, attention, the outputs of the gated MLP's two matmuls, the activation, and gate times up."""
    return 10 * outline.hidden + 4 * outline.queries + 5 * outline.keys + 4 * outline.intermediate


def _head_bytes(outline: Outline, chunk: int, tokens: int, width: int, on_gpu: bool) -> int:
    # A GPU's kernels read float32 logits and write their gradient; elsewhere each operation makes a copy.
    of_logit = FLOAT_BYTES + width if on_gpu else 6 * FLOAT_BYTES
    embedding = outline.vocabulary * outline.hidden * (FLOAT_BYTES + (width if width != FLOAT_BYTES else 0))
    if not outline.is_head_trained:
        embedding = 0
    return chunk * outline.vocabulary * of_logit + embedding + 3 * tokens * outline.hidden * width
