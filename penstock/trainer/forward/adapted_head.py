"""An adapter on the output embedding, as the chunked head needs it: one matmul with wider rows.

states · Wᵀ + scale · (states · Aᵀ) · Bᵀ  =  [states, scale · states · Aᵀ] · [W, B]ᵀ

So nothing is rounded that the layer itself would not round, and the head need not know of adapters.
"""

from typing import Any

import torch


def head_of(embedding: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States and weights whose product is what the output embedding, perhaps with an adapter, makes of `states`."""
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
