"""Defines what a worker pool works with: its workers, its kinds of calls, and the state of each call."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from penstock.channel.suspects import Attempt, Half
from penstock.errors import PenstockError

Call = TypeVar("Call")
Answer = TypeVar("Answer")
C = TypeVar("C", contravariant=True)
A = TypeVar("A", covariant=True)

MESSAGE_S = 0.02
"""How long the calls of one message may take together in the worker. The round trip does not count: on a busy
machine it takes longer than this, and messages of single calls would make the machine busier."""
MAX_CALLS_IN_A_MESSAGE = 64


class PoolWorker(Protocol[C, A]):
    """Represents one worker process of a pool.

    `answer` raises `WorkerDied` or `ChannelClosed` when the process ends during the calls. `end` ends the
    process at once. `restart` ends it if it still runs, waits longer the more deaths in a row it had without
    a call (`num_deaths`), and returns when a new one is ready. It raises `WorkerDied`, `ChannelClosed`,
    `RemoteError` or `OutOfMemory` when no new one starts. Any other error ends the pool.
    """

    async def answer(self, calls: Sequence[C]) -> Sequence[A]: ...

    async def end(self) -> None: ...

    async def restart(self, num_deaths: int) -> None: ...


class CallLost(PenstockError):
    """A call ended its process, or was not answered in time (`is_late`)."""

    def __init__(self, message: str, detail: str = "", *, is_late: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        self.is_late = is_late


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind(Generic[Call, Answer]):
    """Tells a pool what it must know about its calls and answers."""

    worker: str
    """The name of its workers in errors."""
    advice: str
    """Where to look when tasks end their processes, for error messages."""
    task: Callable[[Call], tuple[Any, int, str]]
    """Returns the task of a call, the call's number in that task, and the task's name in messages."""
    limit_s: Callable[[Call], float]
    """How long a process may take to answer before it is ended."""
    late: Callable[[Call], str]
    """The error message of a call that was not answered in time."""
    blames_late: bool = False
    """Whether a late call is itself to blame. Otherwise the process hangs, and any of its calls may be the
    cause."""
    leaves: bool = False
    """Whether the worker finishes a call whose caller has given up."""
    spoils: Callable[[Answer], bool] = lambda answer: False
    """Whether the process must be replaced after this answer, once its other calls have ended."""
    seconds: Callable[[Answer], float] | None = None
    """How long an answer took, where several calls may share a message."""
    num_bytes: Callable[[Call], int] = lambda call: 0


@dataclass(slots=True, eq=False)
class AskedCall(Attempt, Generic[Call, Answer]):
    """Tracks a call until it has ended, on however many processes."""

    call: Call
    number: int
    """Calls are numbered in the order in which they came."""
    answer: "asyncio.Future[Answer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    message: "asyncio.Task[None] | None" = None
    """The message that it was sent in."""
    is_alone: bool = False
    """Whether it must be sent in a message of its own."""
    detail: str = ""
    """Details of the last death."""

    def settle(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class PoolSlot(Generic[Call, Answer]):
    """Tracks a worker and what the pool knows of it."""

    worker: PoolWorker[Call, Answer]
    capacity: int
    number: int
    messages: dict["asyncio.Task[None]", list[AskedCall[Call, Answer]]] = field(default_factory=dict)
    """Messages that it has not answered."""
    half: Half[AskedCall[Call, Answer]] | None = None
    """The suspects that have the worker to themselves."""
    num_deaths: int = 0
    """Deaths in a row without a call."""
    is_broken: bool = False
    """Whether it takes no new calls until it is replaced."""
    is_dead: bool = False
    """Whether its process is gone."""
    is_missed: bool = False
    """Whether it must be replaced even though no call waits."""
    last_number: int = -1
    """Number of the call that it was given last."""
    restarting: "asyncio.Task[None] | None" = None
    call_s: float = MESSAGE_S

    @property
    def is_idle(self) -> bool:
        return not self.messages and self.restarting is None

    @property
    def room(self) -> int:
        """Return how many more messages it takes now."""
        return 0 if self.is_broken else self.capacity - len(self.messages)

    @property
    def message_size(self) -> int:
        """Return how many calls it should be able to answer within `MESSAGE_S`."""
        return max(1, min(MAX_CALLS_IN_A_MESSAGE, int(MESSAGE_S / max(self.call_s, 1e-9))))

    def took(self, mean_s: float) -> None:
        self.call_s = max(mean_s, self.call_s / 2)
