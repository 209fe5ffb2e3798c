"""Whether a trainer can compute again what rollouts were sampled from."""

from penstock.errors import UserError
from penstock.types import SamplingParams


def check_replayed(sampling: SamplingParams) -> None:
    """Refuse what would make the recorded logprobs those of another distribution than the trainer's."""
    settings = sampling.not_replayed()
    if settings:
        raise UserError(
            f"rollouts that are trained on can't be sampled with {', '.join(settings)}: the trainer can't replay "
            "it, so every ratio would be wrong; unset it, or use it in evaluation only"
        )
