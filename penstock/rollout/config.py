"""Defines the `rollout` section: how many attempts at a task, how they are sampled, and what an attempt is."""

from typing import Annotated

from pydantic import Field, field_validator

from penstock.config import Section
from penstock.http_server.http_calls import HttpConfig
from penstock.records import DEFAULT_POLICY, LEAST_TEMPERATURE, SamplingParams


class AgentsConfig(Section):
    """Sets how agents reach the run."""

    host: str = "127.0.0.1"
    """The address that rollout workers listen on. Every episode has a key of its own, so another machine's
    agents may reach it; there is no TLS."""
    models: dict[str, str] = Field(default_factory=dict)
    """The policy that answers for each model name that agents ask for, beside `policy` and the run's own model;
    `"*"` stands for every other name. A run serves one policy, `policy`."""

    @field_validator("models")
    @classmethod
    def _are_served(cls, models: dict[str, str]) -> dict[str, str]:
        for name, policy in models.items():
            if policy != DEFAULT_POLICY:
                raise ValueError(
                    f"rollout.agents.models must name the policy that the run's engines serve, {DEFAULT_POLICY!r}, "
                    f"got {policy!r} for {name!r}; let agents ask for other models where those are served"
                )
        return models


class RolloutConfig(Section):
    """Sets how many attempts are made at a task, how they are sampled, and what an attempt is."""

    group_size: int = Field(default=8, ge=1, le=65536)
    """Episodes per task that are compared with each other (G)."""
    groups_per_step: int = Field(default=8, ge=1, le=65536)
    """Groups that make one optimizer step."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The longest answer, in tokens."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """Sampling temperature. 0 (greedy) has no distribution to train on and is for evaluation only."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the likeliest tokens that hold this much probability; 1 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer."""
    chunk_tokens: int = Field(default=32, ge=1)
    """Tokens that an engine gathers before it sends them. More means fewer messages and later partial
    answers."""
    workflow: str | None = None
    """What an attempt is: `file.py:function` or `module:function` of an `async def workflow(task, rollout)`,
    the URL of an environment, or the command of an agent (`python agent.py`) that uses the run through
    OpenAI's API. Unset: the model answers the prompt once. A task's column `workflow` takes precedence."""
    workers: int = Field(default=1, ge=0, le=1024)
    """Processes that run workflows and answer agents. 0 runs workflows in the controller, where a call that
    blocks stops the whole run and limits of CPU time and memory do not apply; commands still get one
    process."""
    episodes_per_worker: int = Field(default=128, ge=1, le=65536)
    """Episodes that each of these processes runs at once, each in its own thread."""
    processes: int = Field(default=0, ge=0)
    """Commands (agents) that run at once, of all workers together. 0: as many as this machine has cores."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit of an episode. Past it the episode fails, and a process that hangs in it is replaced."""
    retries: int = Field(default=5, ge=0)
    """How often an episode is retried when its workflow could not reach something (`ConnectionError`,
    `TimeoutError`, an answer of 429 or 503, …), after 1, 2, 4 … seconds. Its finished turns and calls are not
    repeated."""
    cpu_s: float = Field(default=0.0, ge=0)
    """CPU time of one episode. Episodes that a process runs at once pool theirs; past the total the process is
    replaced. 0: as much as `timeout_s`."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Memory limit of a process that runs workflows. 0: half of the machine's memory."""
    max_turns: int = Field(default=0, ge=0)
    """The most turns of an episode; 0 is no limit. A further turn is refused, and the episode ends with the
    turns that it has."""
    max_episode_tokens: int = Field(default=0, ge=0)
    """The most tokens that an episode may sample, all turns together; 0 is no limit. The last turn is cut
    there."""
    agents: AgentsConfig = AgentsConfig()
    http: HttpConfig = HttpConfig()

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
