"""What a worker pool works with: its workers, what it knows of calls and answers, and where each call stands."""

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
"""What the calls of one message may take together in the worker. The way there and back does not count: on a busy
machine it is longer than this, and messages of single calls would make it busier."""
MAX_CALLS_IN_A_MESSAGE = 64


class PoolWorker(Protocol[C, A]):
    """One process.

    `answer` raises `WorkerDied` or `ChannelClosed` when the process ends under it. `end` ends the process at once.
    `restart` ends it if it still runs and returns when a new one is ready, a little later after each of
    `num_deaths` in a row with nothing in it; it raises `WorkerDied`, `ChannelClosed`, `RemoteError` or
    `OutOfMemory` when there is none. Any other error ends the pool."""

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
    """What a pool has to know of its calls and answers."""

    worker: str
    """What its workers are called in errors."""
    advice: str
    """Where to look when tasks end their processes."""
    task: Callable[[Call], tuple[Any, int, str]]
    """Of which task a call is, its number among the calls of that task, and the task in words."""
    limit_s: Callable[[Call], float]
    """After that, a process that has not answered is ended."""
    late: Callable[[Call], str]
    """What a call is told then."""
    blames_late: bool = False
    """Whether a call past its limit is itself to blame. Otherwise the process hangs, whoever in it is the cause."""
    leaves: bool = False
    """Whether a caller that gives up leaves the worker to finish."""
    spoils: Callable[[Answer], bool] = lambda answer: False
    """Whether the process is to be replaced after this answer, when the others in it have ended."""
    seconds: Callable[[Answer], float] | None = None
    """What an answer took, where several calls may go into a message."""
    num_bytes: Callable[[Call], int] = lambda call: 0


@dataclass(slots=True, eq=False)
class AskedCall(Attempt, Generic[Call, Answer]):
    """A call until it has ended, on whatever processes."""

    call: Call
    number: int
    """In the order in which calls came."""
    answer: "asyncio.Future[Answer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    message: "asyncio.Task[None] | None" = None
    """In which it is under way."""
    is_alone: bool = False
    """Whether it must be a message of its own."""
    detail: str = ""
    """Of the last death."""

    def settle(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class PoolSlot(Generic[Call, Answer]):
    """A worker and what the pool knows of it."""

    worker: PoolWorker[Call, Answer]
    capacity: int
    number: int
    messages: dict["asyncio.Task[None]", list[AskedCall[Call, Answer]]] = field(default_factory=dict)
    """What it has not answered."""
    half: Half[AskedCall[Call, Answer]] | None = None
    """The suspects that have it to themselves."""
    num_deaths: int = 0
    """In a row, with nothing in it."""
    is_broken: bool = False
    """Whether it takes no new calls until it is replaced."""
    is_dead: bool = False
    """Whether its process is gone."""
    is_missed: bool = False
    """Whether it is to be replaced though no call waits."""
    last_number: int = -1
    """Of the call that it was given last."""
    restarting: "asyncio.Task[None] | None" = None
    call_s: float = MESSAGE_S

    @property
    def is_idle(self) -> bool:
        return not self.messages and self.restarting is None

    @property
    def room(self) -> int:
        """How many more messages it takes now."""
        return 0 if self.is_broken else self.capacity - len(self.messages)

    @property
    def message_size(self) -> int:
        """Calls that it should answer in a moment."""
        return max(1, min(MAX_CALLS_IN_A_MESSAGE, int(MESSAGE_S / max(self.call_s, 1e-9))))

    def took(self, mean_s: float) -> None:
        self.call_s = max(mean_s, self.call_s / 2)
