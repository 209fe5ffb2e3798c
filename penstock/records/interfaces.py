"""Defines what the parts see of each other: small protocols, so that siblings never import siblings.

`penstock.run` passes implementations to their users. Tensors appear only as `Any`: this module must import
without torch.
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
    """Generates tokens: token ids in, token ids out. A pool of engines is one too.

    `generate` is an async generator: closing it, or cancelling the task that iterates it, cancels the request
    and frees what it held. A request that can never be served raises `RequestRefused`.
    """

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Give chunks as they are sampled. The last one has the finish reason."""

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch new weights while generation continues, so that `update` only has to load them. An earlier
        update that was staged and not loaded is dropped. This lets several engines stage at once and load one
        after another."""

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Take new weights: stage them unless that is done, then load them between two forward passes. When staging
        fails, the engine keeps its weights and continues. Updates are taken one after another, in the order of the
        calls. An interrupt that the engine lacks (`interrupt:…` in its capabilities) is refused."""

    async def report(self) -> EngineReport:
        """Return what the engine serves, what it can do, and what it has done so far."""

    async def close(self) -> None:
        """End running requests and free all resources. Idempotent."""


class Scorer(Protocol):
    """Scores episodes. Raises `ScoringFailed` when it can't, which costs their group.

    Unless it `needs_group`, each episode is scored as soon as it has ended. Otherwise a finished group is scored,
    with one score per episode in their order. Where both are allowed, both give an episode the same score.
    """

    @property
    def needs_group(self) -> bool:
        """Return whether a score depends on the other episodes of the group."""

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        """Score one successful episode."""

    async def score(self, group: Group) -> tuple[Score, ...]:
        """Score every successful episode of a group."""

    async def close(self) -> None:
        """Free all resources. Idempotent."""


class Trainer(Protocol):
    """Executes planned steps. A step ends with a snapshot of the new weights, so `publish`, which hashes and
    describes that snapshot, may run beside the next step. With `full`, the update is one that any engine can
    take, whatever it serves. `send` is awaited together with the engines' `update` where `WeightUpdate.sends`
    says that both sides must act; cancelling it notifies the engines. `release` frees a snapshot, and its
    `delivered` says that every engine serves that version. The starting weights have a snapshot from the
    start, under the version that the trainer was started with. An adapter is published under the next
    version, since the weights below it go first."""

    async def step(self, plan: StepPlan) -> StepResult:
        """Make one optimizer step."""

    async def snapshot(self, version: int) -> None:
        """Copy the current weights, if the last step did not."""

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        """Describe the snapshot of a version, so that engines can take it. Raise `SnapshotReplaced` if the
        trainer needed its slot for a newer one."""

    async def send(self, version: int) -> None:
        """Send the version while engines stage it, where the transport needs both sides."""

    async def release(self, version: int, *, delivered: bool = True) -> None:
        """Allow the snapshot of a version to be overwritten."""

    async def save(self, folder: str) -> None:
        """Write the model to a folder that transformers can load."""

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None:
        """Begin to write all that another process needs to continue from here, with `files` (contents by name)
        beside it. The next steps need not wait. The folder appears once it is complete; then the folders of
        older checkpoints are removed."""

    async def checkpoint_written(self) -> CheckpointWritten:
        """Wait until the last checkpoint is durable. Raise if it could not be written."""


Verification = Callable[[], float]
"""Raises `FingerprintMismatch` unless an engine has the trainer's weights; returns how many seconds that took."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Holds an update that is ready to be loaded, and what the transport keeps for it (buckets, a copy,
    nothing)."""

    update: WeightUpdate
    held: Any = None


class WeightReceiver(Protocol):
    """Implements the engine's side of a transport, in two phases. `stage` does what takes long (network, disk,
    decompression) while the engine keeps generating. `load` copies into live tensors between two forward
    passes; only that stalls the engine.

    On a GPU, `load` may return when the copies are only queued. The function that it returns waits for them
    and compares the fingerprint of what was written with the trainer's. Until it was called, nothing computed
    with the new weights may leave the engine.
    """

    def stages(self, update: WeightUpdate) -> bool:
        """Return whether `stage` takes long enough to need a thread of its own."""

    def stage(self, update: WeightUpdate) -> Staged:
        """Fetch the update. Live tensors stay unchanged, whatever happens. Raise `DamagedBucket` if data did not
        arrive as it was sent."""

    def cancel(self) -> None:
        """Make a running `stage` raise soon, whatever it waits for. Called from another thread."""

    def is_prepared(self, staged: Staged) -> bool:
        """Return whether `load` would only queue work that this device has done before: it would take no memory,
        and open, load or wait for nothing. Then an engine may halt its device until the load is done."""

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        """Copy a staged update into the live tensors."""

    def drop(self, staged: Staged) -> None:
        """Free what staging holds: after a load, or instead of one."""

    def close(self) -> None:
        """Free all resources. Idempotent."""


class WeightPublisher(Protocol):
    """Implements the trainer's side of a transport. The trainer's step waits only for `snapshot`. `describe`, which
    hashes, and `send`, which does nothing where engines read by themselves, run beside the next step."""

    def snapshot(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Copy the current weights."""

    def describe(self, version: int, *, full: bool = False) -> WeightUpdate:
        """Return the update for engines. With `full` it does not build on a version that they must already
        serve."""

    def send(self, version: int) -> None:
        """Send the version to the engines that stage it now, where `WeightUpdate.sends` is set."""

    def cancel(self) -> None:
        """Make a running `send` raise soon, and notify its receivers. Called from another thread."""

    def release(self, version: int, *, delivered: bool = True) -> None:
        """Free the snapshot of a version. `delivered`: every engine serves it, so later versions may build on
        it."""

    def close(self) -> None:
        """Free all resources. Idempotent."""


class Ranks(Protocol):
    """Connects the processes that train one policy together, each on its part of a step. All make the same calls
    in the same order, so a rank without data still calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return what each rank passed, by rank. Lengths may differ."""

    def sum_tensors(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor by its sum over the ranks, in place. Shapes are the same on all ranks."""


class BlobStore(Protocol):
    """Stores bulk data while records travel. Engines put, the trainer gets. The controller checks blobs, copies
    them beside its journal, and deletes those of a group once it has been trained or dropped.

    A key is `scope/name`. A second put under a key replaces the blob, so a request may be served twice.
    `BlobLost` is raised for data that can't be written, or that is not what was put.
    """

    def put(self, key: str, data: bytes) -> BlobRef:
        """Store the bytes under the key."""

    def get(self, ref: BlobRef) -> bytes:
        """Return the bytes, verified."""

    def holds(self, ref: BlobRef) -> bool:
        """Return whether the blob exists with its size. This is cheap: nothing is read."""

    def delete(self, scope: str) -> None:
        """Delete every blob of a scope; a scope without blobs is fine."""


class Tokenizer(Protocol):
    """Defines what rollouts and engines need of a tokenizer."""

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        """Encode a prompt up to where the answer begins: text as it is, messages through the chat template."""

    def encode(self, text: str) -> list[int]:
        """Encode text that follows other tokens: no BOS or EOS is added."""

    def encode_reply(self, messages: tuple[Message, ...], *, after: int | None) -> list[int]:
        """Encode what the chat template puts between an answer, whose last token is `after`, and the next
        answer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens to text, with special tokens by name or without them."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end an answer."""


class Clock(Protocol):
    """Tells seconds that never decrease. `asyncio`'s loop has such a clock; the simulation brings its own."""

    def time(self) -> float: ...
