"""What the parts see of each other: small protocols, so that siblings never import siblings.

`penstock.run` is where an implementation meets its user. Tensors appear only as `Any`: this module
must import without torch.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from penstock.records import (
    BlobRef,
    CheckpointWritten,
    Chunk,
    EngineReport,
    Episode,
    GenerateRequest,
    Group,
    Interrupt,
    Message,
    Score,
    StepPlan,
    StepResult,
    Task,
    UpdateReceipt,
    WeightUpdate,
)


class Engine(Protocol):
    """Token ids in, token ids out. A pool of engines is one too.

    `generate` is an async generator: closing it (or cancelling the task that iterates it) cancels the
    request and frees what it held. A request that can never be served raises `RequestRefused`."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks as they are sampled; the last one says why it is the last."""

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch new weights beside generation, so that `update` has only to load them. Another update that was
        staged and not loaded is dropped. So several engines stage at once and load one after the other."""

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Take new weights: stage them while generating, unless that is done, then load them between two forward
        passes. When staging fails, the engine goes on with the weights that it has. Updates are taken one after
        another, in the order of the calls. An interrupt that the engine lacks (`interrupt:…` in its capabilities)
        is refused."""

    async def report(self) -> EngineReport:
        """What it serves, what it can do, and what it has done so far."""

    async def close(self) -> None:
        """End running requests and free what it holds. Idempotent."""


class Scorer(Protocol):
    """Says what episodes are worth. Raises `ScoringFailed` when it can't, which costs their group.

    Unless it `needs_group`, each episode is scored as soon as it has ended; otherwise a finished group, with one
    score per episode in their order. Both give an episode the same score where both are allowed."""

    @property
    def needs_group(self) -> bool:
        """Whether a score depends on the other episodes of the group."""

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        """One good episode."""

    async def score(self, group: Group) -> tuple[Score, ...]:
        """Every good episode of a group."""

    async def close(self) -> None:
        """Free what it holds. Idempotent."""


class Trainer(Protocol):
    """Executes planned steps. A step ends with a snapshot of the weights that it made, so that `publish`
    (which hashes and describes that snapshot) may run beside the next step. With `full` it is an update that any
    engine can take, whatever it serves. `send` is awaited together with the engines' `update` where
    `WeightUpdate.sends` says that both sides must act; cancelling it tells them. `release` gives a snapshot back,
    and `delivered` says that every engine serves it. The starting weights have a snapshot from the start, under
    the version that the trainer was started with; an adapter's is the next, since the weights below it go first."""

    async def step(self, plan: StepPlan) -> StepResult:
        """Make one optimizer step."""

    async def snapshot(self, version: int) -> None:
        """Copy the weights as they are now, where the last step did not."""

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        """Describe the snapshot of a version, so that engines can take it. Raises `SnapshotReplaced` where the
        trainer needed its place for a newer one."""

    async def send(self, version: int) -> None:
        """Act while engines stage the version, where the transport needs both sides."""

    async def release(self, version: int, *, delivered: bool = True) -> None:
        """The snapshot of a version may be overwritten."""

    async def save(self, folder: str) -> None:
        """Write the model as a folder that transformers can load."""

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None:
        """Begin to write all that another process needs to go on from here, and `files` (names and what is in them)
        beside it; the next steps need not wait. The folder is there when all of it is; then the folders of older
        checkpoints are removed."""

    async def checkpoint_written(self) -> CheckpointWritten:
        """Wait until the checkpoint that was begun last is durable. Raises when it could not be written."""


Verification = Callable[[], float]
"""Raises `FingerprintMismatch` unless an engine has the trainer's weights; returns the seconds it took."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An update that is ready to be loaded, and what the transport holds for it (buckets, a copy, nothing)."""

    update: WeightUpdate
    held: Any = None


class WeightReceiver(Protocol):
    """The engine's side of a transport, in two phases. `stage` does what takes long (network, disk, decompression)
    while the engine goes on generating; `load` copies into live tensors between two forward passes, and only that
    is a stall.

    On a GPU the copies may only have been queued when `load` returns. What it returns waits for them and
    holds the fingerprint of what was written against the trainer's; until that was called, nothing computed
    with the new weights may leave the engine."""

    def stages(self, update: WeightUpdate) -> bool:
        """Whether `stage` takes long enough to need a thread of its own."""

    def stage(self, update: WeightUpdate) -> Staged:
        """Fetch the update. Live tensors stay as they are, whatever happens. What did not arrive as it was sent
        raises `DamagedBucket`."""

    def cancel(self) -> None:
        """From another thread: a `stage` that is under way raises soon, whatever it waits for."""

    def is_prepared(self, staged: Staged) -> bool:
        """Whether `load` would now only queue what this device has done before: no memory is taken, nothing
        is opened, loaded or waited for. Then an engine may make its device stand still until that is done."""

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        """Copy a staged update into the live tensors."""

    def drop(self, staged: Staged) -> None:
        """Free what staging held: after a load, or instead of one."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""


class WeightPublisher(Protocol):
    """The trainer's side of a transport. `snapshot` is all that the trainer's step waits for; `describe`, which
    hashes, and `send`, which does nothing where engines read by themselves, run beside the next step."""

    def snapshot(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Copy the weights as they are now."""

    def describe(self, version: int, *, full: bool = False) -> WeightUpdate:
        """What engines are sent. With `full` it builds on no version that they would have to serve."""

    def send(self, version: int) -> None:
        """Send it to the engines that stage it now, where `WeightUpdate.sends` says so."""

    def cancel(self) -> None:
        """From another thread: a `send` that is under way raises soon, and its receivers are told."""

    def release(self, version: int, *, delivered: bool = True) -> None:
        """Its snapshot is not needed any more. `delivered`: every engine serves it, and later ones may build on
        it."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""


class Ranks(Protocol):
    """The processes that train one policy together, each on its part of a step. All make the same calls in the same
    order, so a rank without anything to tell still calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """What each rank gave, by rank. Lengths may differ."""

    def sum_tensors(self, tensors: Sequence[Any]) -> None:
        """Make each tensor the sum of what the ranks have, in place. Shapes are the same on all."""


class BlobStore(Protocol):
    """Where bulk data is while records travel. Engines put, the trainer gets; the controller only asks whether a
    blob is there, and deletes those of a group once it has been trained or dropped.

    A key is `scope/name`. Putting under a key again replaces the blob, so a request may be served twice. What can't
    be written or is not what was put raises `BlobLost`."""

    def put(self, key: str, data: bytes) -> BlobRef:
        """Keep the bytes under the key."""

    def get(self, ref: BlobRef) -> bytes:
        """The bytes, checked."""

    def holds(self, ref: BlobRef) -> bool:
        """Whether it is there with its size. Cheap: nothing is read."""

    def delete(self, scope: str) -> None:
        """Delete every blob of a scope; one without blobs is fine."""


class Tokenizer(Protocol):
    """What rollouts and engines need of a tokenizer."""

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        """What an answer begins after: text as it is, messages through the chat template."""

    def encode(self, text: str) -> list[int]:
        """Text that follows other tokens: nothing is added at its ends."""

    def encode_reply(self, messages: tuple[Message, ...], *, after: int | None) -> list[int]:
        """What the chat template puts between an answer, whose last token is `after`, and the next answer."""

    def decode(self, token_ids: list[int]) -> str:
        """Tokens as text, without special ones."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""


class Clock(Protocol):
    """Seconds that only grow. `asyncio`'s loop has one; the simulation brings its own."""

    def time(self) -> float: ...
