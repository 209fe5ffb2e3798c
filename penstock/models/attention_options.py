"""What a model asks of its attention beside queries, keys and values: one record for all backends and kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Of one attention layer. Attention is always causal."""

    scaling: float
    """What scores are multiplied by before anything else."""
    sliding_window: int | None = None
    """How many keys a query sees, its own among them; None is all of them."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: torch.Tensor | None = None
    """(heads,): a score of each head that takes its share of the softmax and gives no value."""

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels know it: neither capped scores nor sinks."""
        return self.softcap is None and self.sinks is None
