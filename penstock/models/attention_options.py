"""Holds what a model asks of its attention beside queries, keys and values, for all backends and kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Holds the options of one attention layer. Attention is always causal."""

    scaling: float
    """The factor that scores are multiplied by before anything else."""
    sliding_window: int | None = None
    """How many keys a query sees, its own among them; None is all of them."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: torch.Tensor | None = None
    """(heads,): one extra score per head, which takes part in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Return whether fused kernels support it: neither capped scores nor sinks."""
        return self.softcap is None and self.sinks is None
