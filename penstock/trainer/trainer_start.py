"""What a trainer process is told first, and the names in its checkpoints. `penstock.worker.trainer_role` becomes
that rank of the trainer."""

from typing import Any

import msgspec

from penstock.channel import Method
from penstock.records import DEFAULT_POLICY

TRAINER_STATE, MODEL = "trainer", "model"
"""Folders of a checkpoint."""
LATEST = "latest"
"""Names the newest checkpoint, beside it."""


class TrainerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a trainer worker."""

    model: str
    pad_token: str | None = None
    """What the saved tokenizer pads with; None: its own."""
    trust_remote_code: bool = False
    lora: dict[str, Any] | None = None
    """The adapter that is trained (`models.config.LoraConfig`); None: all weights are."""
    adapter: str = ""
    """The folder of the adapter that it goes on from; "" begins with one that changes nothing."""
    device: str
    threads: int
    total_steps: int
    seed: int
    folder: str
    """Where published buckets are put."""
    blobs: str = ""
    """The folder of the run's blob store; "" is an empty store."""
    max_context: int = 0
    """The longest sequence that it will train on; 0: as long as the model's own limit."""
    sync: dict[str, Any]
    """The section: how weights are published."""
    sync_token: str = ""
    """What engines must know to be served weights."""
    wire_dtype: str
    """The number format that they travel in."""
    policy: str = DEFAULT_POLICY
    """Whose weights it trains and publishes."""
    version: int = 0
    """The number under which the weights that it starts with are published; an adapter follows under the next."""
    replays_routing: bool = False
    """Whether samples will come with recorded experts: a model that can't replay them is refused."""
    deterministic: bool = False
    """Refuse what does not compute the same each time."""
    checkpoint: str = ""
    """The folder of the checkpoint that it goes on from; "" starts with the model as it is."""
    trainer: dict[str, Any]
    algorithm: dict[str, Any]
    search_path: tuple[str, ...] = ()
    """Where the algorithm's functions of a user are imported from."""
    rank: int = 0
    """Which of the ranks that `trainer.parallel` counts it is."""
    rendezvous: str = ""
    """Where they meet: `file:///path` or `tcp://host:port`. "" where there is one."""


class TrainerReady(msgspec.Struct, frozen=True, kw_only=True):
    num_parameters: int


START_TRAINER = Method("trainer.start", TrainerStart, TrainerReady)
