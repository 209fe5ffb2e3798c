"""What the parts see of each other: small protocols, so that siblings never import siblings.

`orchestration` is where an implementation meets its user. Tensors appear only as `Any`: this module
must import without torch.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from penstock.types import (
    Chunk,
    EngineReport,
    GenerateRequest,
    Group,
    Message,
    Score,
    StepPlan,
    StepResult,
    UpdateReceipt,
    WeightUpdate,
)


class Engine(Protocol):
    """Token ids in, token ids out. A pool of engines is one too.

    `generate` is an async generator: closing it (or cancelling the task that iterates it) cancels the
    request and frees what it held. A request that can never be served raises `RequestRefused`."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...

    async def update(self, update: WeightUpdate) -> UpdateReceipt: ...

    async def report(self) -> EngineReport: ...

    async def close(self) -> None: ...


class Scorer(Protocol):
    """Scores a finished group: one score per episode. Raises `ScoringFailed` when it can't."""

    async def score(self, group: Group) -> tuple[Score, ...]: ...

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Executes planned steps. A step ends with a snapshot of the weights that it made, so that `publish`
    (which hashes and describes that snapshot) may run beside the next step; `release` says that every
    engine has read a version. The snapshot of the starting weights, version 0, is there from the start."""

    async def step(self, plan: StepPlan) -> StepResult: ...

    async def publish(self, version: int) -> WeightUpdate: ...

    async def release(self, version: int) -> None: ...

    async def save(self, folder: str) -> None: ...


class WeightReceiver(Protocol):
    """The engine's side of a transport: copies a publication into live parameters, then computes the
    fingerprint of those live parameters and raises `FingerprintMismatch` unless it is the trainer's.
    Synchronous: the engine calls it between two forward passes. Returns the seconds spent verifying."""

    def receive(self, update: WeightUpdate, parameters: Mapping[str, Any]) -> float: ...

    def close(self) -> None: ...


class WeightPublisher(Protocol):
    """The trainer's side of a transport."""

    def publish(self, version: int, parameters: Mapping[str, Any]) -> WeightUpdate: ...

    def release(self, version: int) -> None: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """What rollouts and engines need of a tokenizer."""

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


class Clock(Protocol):
    """Seconds that only grow. `asyncio`'s loop has one; the simulation brings its own."""

    def time(self) -> float: ...
