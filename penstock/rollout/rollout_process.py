"""What a process that runs workflows is told first, and then asked. The worker's side is
`penstock.worker.rollout_role`.

Calls go both ways over the one channel: the controller asks for episodes, and an episode asks the controller's
engines for its turns and tells it what its calls gave.
"""

from typing import Any, Protocol

import msgspec

from penstock.channel import Method
from penstock.records import CallAnswer, Episode, Record
from penstock.rollout.episode_spec import EpisodeSpec


class RolloutStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a worker that runs workflows."""

    model: str
    """Whose tokenizer it loads."""
    trust_remote_code: bool = False
    template_args: dict[str, Any] = {}
    """What its chat template gets beside the messages."""
    workflow: str | None
    max_context: int = 1 << 20
    """The longest sequence that engines take."""
    host: str = "127.0.0.1"
    """Where it listens for agents."""
    model_names: dict[str, str] = {}
    """Further names of models that agents may ask for, with the policies that answer."""
    streams: bool = True
    """Agents are sent answers as they come, if they ask for it. Not where new weights make answers begin again."""
    http: dict[str, Any] = {}
    """How environments are asked that are named by URL."""
    cpu_s: float = 1800.0
    """CPU time of one episode."""
    search_path: tuple[str, ...]
    """Folders that user modules may be imported from, first of all."""


class Outcome(Record, frozen=True, kw_only=True):
    """An episode as it ended; `stuck` says that its thread did not: a call in it blocks past the time limit."""

    episode: Episode
    stuck: bool = False


class RolloutProcess(Protocol):
    """Runs episodes, several at once."""

    async def run(self, spec: EpisodeSpec) -> Outcome: ...


class CallKeeper(Protocol):
    """The controller, for calls that episodes make through their rollouts."""

    async def keep_call(self, answer: CallAnswer) -> None: ...


START_ROLLOUT = Method("rollout.start", RolloutStart, type(None))
