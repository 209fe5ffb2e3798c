"""The `rollout` section: how many attempts at a task, how they are sampled, and what an attempt is."""

from pydantic import Field

from penstock.config import Section
from penstock.types import SamplingParams


class RolloutConfig(Section):
    """How many attempts are made at a task, how they are sampled, and what an attempt is."""

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
    workflow: str | None = None
    """What an attempt is: `file.py:function` or `module:function` of an `async def workflow(task, rollout)`.
    Without one, the prompt goes in and one answer comes out. A task's column `workflow` goes before it."""
    workers: int = Field(default=0, ge=0)
    """Processes that run workflows. 0 runs them in the controller, where a call that blocks stops the whole run."""
    episodes_per_worker: int = Field(default=128, ge=1)
    """Episodes that such a process runs at once, each in a thread of its own."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """The longest time an episode may take. Then it has failed; a process that hangs in it is replaced."""

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
