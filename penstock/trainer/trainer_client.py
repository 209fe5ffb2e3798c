"""A trainer rank in another process, behind a channel. The worker's side is `penstock.worker.trainer_role`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.channel import Channel, Method
from penstock.trainer.plan_transfer import send_step
from penstock.types import DEFAULT_POLICY, CheckpointWritten, StepPlan, StepResult, WeightUpdate

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


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    full: bool


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    delivered: bool


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    folder: str


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    files: dict[str, bytes]
    """What others have to add: names, and what is in them."""
    remove: tuple[str, ...] = ()
    """Folders that it makes superfluous."""


START_TRAINER = Method("trainer.start", TrainerStart, TrainerReady)
SNAPSHOT = Method("trainer.snapshot", int, type(None))
PUBLISH = Method("trainer.publish", PublishRequest, WeightUpdate)
SEND = Method("trainer.send", int, type(None))
RELEASE = Method("trainer.release", ReleaseRequest, type(None))
SAVE = Method("trainer.save", SaveRequest, type(None))
CHECKPOINT = Method("trainer.checkpoint", CheckpointRequest, type(None))
CHECKPOINT_WRITTEN = Method("trainer.checkpoint_written", type(None), CheckpointWritten)


class TrainerClient:
    """`penstock.interfaces.Trainer` over a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def start(self, start: TrainerStart) -> TrainerReady:
        return await self._channel.call(START_TRAINER, start)

    async def step(self, plan: StepPlan) -> StepResult:
        return await send_step(self._channel, plan)

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        return await self._channel.call(PUBLISH, PublishRequest(version=version, full=full))

    async def snapshot(self, version: int) -> None:
        await self._channel.call(SNAPSHOT, version)

    async def send(self, version: int) -> None:
        await self._channel.call(SEND, version)

    async def release(self, version: int, *, delivered: bool = True) -> None:
        await self._channel.call(RELEASE, ReleaseRequest(version=version, delivered=delivered))

    async def save(self, folder: str) -> None:
        await self._channel.call(SAVE, SaveRequest(folder=folder))

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None:
        request = CheckpointRequest(folder=folder, files=files, remove=tuple(remove))
        await self._channel.call(CHECKPOINT, request)

    async def checkpoint_written(self) -> CheckpointWritten:
        return await self._channel.call(CHECKPOINT_WRITTEN, None)
