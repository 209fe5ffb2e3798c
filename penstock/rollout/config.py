"""The `rollout` section: how many attempts at a task, and how they are sampled."""

from pydantic import Field

from penstock.config import Section
from penstock.types import SamplingParams


class RolloutConfig(Section):
    """How many attempts are made at a task, and how they are sampled."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per task that are compared with each other (G)."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups that make one optimizer step."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The longest answer, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. 0 (greedy) has no distribution to train on and is for evaluation only."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the likeliest tokens that hold this much probability; 1 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    chunk_tokens: int = Field(default=32, ge=1)
    """Tokens that an engine gathers before it sends them: fewer messages, later sight of partial answers."""

    def sampling(self, stop_token_ids: tuple[int, ...], seed: int | None = None) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
            seed=seed,
        )
