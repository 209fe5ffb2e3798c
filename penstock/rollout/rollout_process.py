"""Defines the messages of a process that runs workflows: its start, and its calls. The worker's side is
`penstock.worker.rollout_role`.

Calls go both ways over one channel. The controller asks for episodes. An episode asks the controller's
engines for its turns, and sends it the results of its calls.
"""

from typing import Any, Protocol

import msgspec

from penstock.channel import Method
from penstock.records import CallAnswer, Episode, Record
from penstock.rollout.episode_spec import EpisodeSpec


class RolloutStart(msgspec.Struct, frozen=True, kw_only=True):
    """Starts a worker that runs workflows, as the first message to it."""

    model: str
    """The model whose tokenizer the worker loads."""
    trust_remote_code: bool = False
    template_args: dict[str, Any] = {}
    """Arguments of the chat template beside the messages."""
    workflow: str | None
    max_context: int = 1 << 20
    """The longest sequence that engines accept."""
    host: str = "127.0.0.1"
    """The address on which the worker listens for agents."""
    model_names: dict[str, str] = {}
    """Further model names that agents may ask for, each with its policy."""
    streams: bool = True
    """Whether streams send tokens as they are sampled. False where new weights make answers restart."""
    http: dict[str, Any] = {}
    """The `HttpConfig` for environments that are named by URL."""
    cpu_s: float = 1800.0
    """CPU time of one episode; episodes that run at once pool theirs."""
    search_path: tuple[str, ...]
    """Folders that user modules are imported from, before all others."""


class Outcome(Record, frozen=True, kw_only=True):
    """Holds an ended episode. `stuck` says that its thread has not ended: a call in it blocks past the time
    limit."""

    episode: Episode
    stuck: bool = False


class RolloutProcess(Protocol):
    """Runs episodes, several at once."""

    async def run(self, spec: EpisodeSpec) -> Outcome: ...


class CallKeeper(Protocol):
    """Stores, in the controller, the results of calls that episodes make through their rollouts."""

    async def keep_call(self, answer: CallAnswer) -> None: ...


START_ROLLOUT = Method("rollout.start", RolloutStart, type(None))
