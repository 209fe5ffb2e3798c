"""Defines the first message to a trainer process, and the names in its checkpoints.
`penstock.worker.trainer_role` becomes one rank of the trainer by this message."""

from typing import Any

import msgspec

from penstock.channel import Method
from penstock.records import DEFAULT_POLICY

TRAINER_STATE, MODEL = "trainer", "model"
"""Folders of a checkpoint."""
LATEST = "latest"
"""The link to the newest checkpoint, beside the checkpoints."""


class TrainerStart(msgspec.Struct, frozen=True, kw_only=True):
    """Says which model a trainer worker trains, and how. It is the first message that the worker receives."""

    model: str
    pad_token: str | None = None
    """The pad token of the saved tokenizer; None keeps its own."""
    trust_remote_code: bool = False
    lora: dict[str, Any] | None = None
    """The adapter that is trained (`models.config.LoraConfig`); None trains all weights."""
    adapter: str = ""
    """The folder of the adapter to continue from; "" starts with an adapter that changes nothing."""
    device: str
    threads: int
    total_steps: int
    seed: int
    folder: str
    """The folder for published buckets."""
    blobs: str = ""
    """The folder of the run's blob store; "" is an empty store."""
    max_context: int = 0
    """The longest sequence that it will train on; 0 is the model's own limit."""
    sync: dict[str, Any]
    """The `sync` section: how weights are published."""
    sync_token: str = ""
    """The token that engines must present to be served weights."""
    wire_dtype: str
    """The number format that weights travel in."""
    policy: str = DEFAULT_POLICY
    """The policy whose weights it trains and publishes."""
    version: int = 0
    """The version under which the starting weights are published; an adapter follows under the next."""
    replays_routing: bool = False
    """Whether samples will come with recorded experts: a model that can't replay them is refused."""
    deterministic: bool = False
    """Refuse operations whose results are not reproducible."""
    checkpoint: str = ""
    """The folder of the checkpoint to resume from; "" starts with the model as it is."""
    trainer: dict[str, Any]
    algorithm: dict[str, Any]
    search_path: tuple[str, ...] = ()
    """Folders from which the user's own algorithm functions are imported."""
    rank: int = 0
    """This process's rank among those of `trainer.parallel`."""
    rendezvous: str = ""
    """The address where ranks meet: `file:///path` or `tcp://host:port`; "" for a single rank."""


class TrainerReady(msgspec.Struct, frozen=True, kw_only=True):
    num_parameters: int


START_TRAINER = Method("trainer.start", TrainerStart, TrainerReady)
