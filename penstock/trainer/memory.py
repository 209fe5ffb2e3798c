"""How much memory a trainer will need, before anything is loaded.

Weights, gradients, masters and moments are exact; activations are those of a Llama-like layer, and rough for
others. Not counted: the CUDA context, fragmentation, the snapshots that a weight sync keeps.
"""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.trainer.codes import BLOCK
from penstock.trainer.config import TrainerConfig
from penstock.trainer.eightbit import CHUNK_VALUES
from penstock.trainer.host import BUCKET_VALUES

FLOAT_BYTES = 4
CODED_BYTES = 2 * (1 + FLOAT_BYTES / BLOCK)
"""Both moments of a value in 8 bits, with their share of the scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes by what they hold, on the device unless named otherwise."""

    weights: int
    gradients: int
    masters: int
    moments: int
    reference: int
    """A frozen model beside the policy, for a KL penalty."""
    activations: int
    """What forward keeps for backward, of one micro-batch."""
    head: int
    """A chunk of logits with its gradient, and the gradient of the output embedding."""
    layer: int
    """What one layer's backward needs for itself."""
    update: int
    """What an optimizer update needs for itself."""
    loading: int
    """The peak before the first step: float32 weights, from which masters are made."""
    host: int
    """In the host's memory."""

    @property
    def resident(self) -> int:
        """What is there all the time, gradients included: a step of several micro-batches adds them up."""
        return self.weights + self.gradients + self.masters + self.moments + self.reference

    @property
    def total(self) -> int:
        """The peak. The head, a layer and the update need their memory at different times."""
        step = self.activations + max(self.head, self.layer)
        return max(self.resident + max(step, self.update), self.loading)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The numbers of a model that memory depends on."""

    parameters: int
    layers: int
    hidden: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    inner: int
    """Width of the MLP that a token goes through."""
    vocabulary: int

    @classmethod
    def of(cls, model_config: Any) -> "ModelSize":
        text = model_config.get_text_config()
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            parameters=_count_parameters(model_config),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            queries=heads * head_dim,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
            inner=_inner_width(text),
            vocabulary=text.vocab_size,
        )


def estimate_bytes(
    model_config: Any,
    config: TrainerConfig,
    *,
    tokens: int | None = None,
    reference: bool = False,
    on_gpu: bool = True,
) -> MemoryEstimate:
    """What training a model of this transformers config takes. `tokens` is the longest row: a sequence that is
    longer than `micro_batch_tokens` is one by itself."""
    size = ModelSize.of(model_config)
    tokens = config.micro_batch_tokens if tokens is None else tokens
    width = 2 if config.dtype == "bfloat16" else FLOAT_BYTES
    on_host = config.optimizer_states == "cpu" and on_gpu
    num_floats = FLOAT_BYTES * size.parameters
    masters = 0 if config.dtype == "float32" else num_floats
    moments = 2 * num_floats
    if config.optimizer_states == "8bit":
        moments = round(CODED_BYTES * size.parameters)
    # Staging on the host: two buckets of gradients and two of weights.
    staging = 2 * BUCKET_VALUES * (FLOAT_BYTES + width)
    return MemoryEstimate(
        weights=width * size.parameters,
        gradients=num_floats,
        masters=0 if on_host else masters,
        moments=0 if on_host else moments,
        reference=num_floats if reference else 0,
        activations=tokens * size.layers * width * _kept_values(size, config.checkpointing),
        head=_head_bytes(size, min(tokens, config.logprob_chunk_tokens), tokens, width, on_gpu),
        layer=0 if config.checkpointing == "off" else tokens * width * _layer_values(size),
        update=10 * FLOAT_BYTES * CHUNK_VALUES if config.optimizer_states == "8bit" else 0,
        loading=num_floats + (0 if on_host else masters) + (num_floats if reference else 0),
        host=num_floats + moments + staging if on_host else 0,
    )


def _kept_values(size: ModelSize, checkpointing: str) -> int:
    """Values that a layer keeps of every token."""
    match checkpointing:
        case "full":
            return size.hidden
        case "selective":
            # Its input, queries, attention, their projection, and one of the two wide products of the MLP.
            return 2 * size.hidden + 2 * size.queries + size.inner
    return _layer_values(size)


def _layer_values(size: ModelSize) -> int:
    """All of a layer: two norms that compute in float32, queries and keys before and after rotation, values,
    attention, the gated MLP's two products, its activation and their product."""
    return 10 * size.hidden + 4 * size.queries + 5 * size.keys + 4 * size.inner


def _head_bytes(size: ModelSize, chunk: int, tokens: int, width: int, on_gpu: bool) -> int:
    # A GPU's kernels read float32 logits and write their gradient; elsewhere each operation makes a copy.
    of_logit = FLOAT_BYTES + width if on_gpu else 6 * FLOAT_BYTES
    embedding = size.vocabulary * size.hidden * (FLOAT_BYTES + (width if width != FLOAT_BYTES else 0))
    return chunk * size.vocabulary * of_logit + embedding + 3 * tokens * size.hidden * width


def _inner_width(text: Any) -> int:
    """Of the MLP; of a mixture, the experts that a token goes through, and those that all go through."""
    chosen = getattr(text, "num_experts_per_tok", None)
    of_expert = getattr(text, "moe_intermediate_size", None)
    if chosen and of_expert:
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        return int(chosen * of_expert + shared)
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return int(inner * (chosen or 1))


def _count_parameters(model_config: Any) -> int:
    """Exact, from a model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())
