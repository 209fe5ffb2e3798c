"""What a run has used: GPU-hours, tokens for each of them, and a price where one is set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    num_gpus: int
    gpu_hours: float
    """From the beginning of every session to its end, whatever the GPUs did meanwhile."""
    tokens: float
    """Generated while the run trained."""
    tokens_per_gpu_hour: float | None
    """None without a GPU."""
    price: float | None
    """None where `observe.gpu_hour_price` is not set."""


def cost_of(*, num_gpus: int, seconds: float, tokens: float, gpu_hour_price: float | None) -> Cost:
    hours = num_gpus * seconds / 3600
    return Cost(
        num_gpus=num_gpus,
        gpu_hours=hours,
        tokens=tokens,
        tokens_per_gpu_hour=tokens / hours if hours > 0 else None,
        price=None if gpu_hour_price is None else hours * gpu_hour_price,
    )
