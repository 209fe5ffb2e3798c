"""Scoring on worker processes: whoever is free takes the next call; who hangs or dies is replaced.

A call is one episode, or one group where a function needs it. What a worker does wrong costs that call and nothing
more: of several calls in a process that died, each runs again alone in one, and a call that ends two processes, the
last of them alone, has failed. A worker that dies time after time with nothing in it ends the run, and so do tasks
that end their process one after the other while nothing is scored, once they are more than were under way together.

Calls that wait while every worker is busy go out several in a message, as many as a worker answers in a moment: a
reward of microseconds is not held up by a round trip for each episode, and a slow one has its calls alone. The
bytes of a message are bounded too; a call that is too large for any message fails by itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import ChannelClosed, RemoteError, RequestRefused, ScoringFailed, WorkerDied
from penstock.scoring.reward_calls import SCORE_ERROR
from penstock.scoring.scoring_client import ScoringRequest, Verdict
from penstock.scoring.thread_scorer import refuse_if_group_is_needed, timed_out
from penstock.types import Episode, Group, Score, Task

WORKER_DIED = "score_worker_died"
"""The worker's process ended while it was scoring."""
TOO_LARGE = "score_too_large"
"""A call, or its answer, has more bytes than a message may have."""
MAX_DEATHS_IN_A_ROW = 5
DEATHS_OF_A_CULPRIT = 2
"""The last of them alone: a single death may have a cause outside."""
MESSAGE_S = 0.02
"""What the calls of one message may take together in the worker. The way there and back does not count: on a busy
machine it is longer than this, and messages of single calls would make it busier."""
MAX_CALLS_IN_A_MESSAGE = 64
MESSAGE_BYTES = 8 << 20
"""About what a message of several calls holds. A single call is never cut."""
RECORD_BYTES = 256
"""About what a record takes beside its arrays and text."""

Scores = tuple[Score, ...]


class ScoringWorker(Protocol):
    """One process that answers `concurrency` messages at a time, a verdict for each request in them.

    `score` raises `ScoringFailed` with reason `score_worker_died` when the process ends under it
    (`WorkerDied` and `ChannelClosed` mean the same). `restart` ends that process if it still runs and returns
    once a new one is ready to score, a little later after each of `num_deaths` in a row; it raises `WorkerDied` or
    `RemoteError` when there is none."""

    @property
    def needs_group(self) -> bool: ...

    @property
    def concurrency(self) -> int: ...

    async def score(self, requests: Sequence[ScoringRequest]) -> Sequence[Verdict]: ...

    async def restart(self, num_deaths: int) -> None: ...


class ScorerPool:
    """`penstock.interfaces.Scorer` over workers that are already started, with a time limit per call. `told` hears
    of each task that is found to end its process."""

    def __init__(
        self,
        workers: Sequence[ScoringWorker],
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        max_deaths: int = MAX_DEATHS_IN_A_ROW,
        told: Callable[[str], None] = lambda words: None,
    ) -> None:
        if not workers:
            raise ValueError("a scorer pool needs at least one worker, got none")
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._max_deaths = max_deaths
        self._told = told
        self._places = places = [_Place(worker, number) for number, worker in enumerate(workers)]
        seats = range(max(worker.concurrency for worker in workers))
        self._free = deque(place for seat in seats for place in places if seat < place.concurrency)
        self._waiting: deque[_Call] = deque()
        self._suspects: deque[_Call] = deque()
        """Calls whose process died under several."""
        self._apart: _Place | None = None
        """The worker that is kept for them, one at a time."""
        self._under_way: set[_Call] = set()
        self._tasks_in_a_row = self._most_tasks = 0
        """Tasks that ended their process since something was last scored, and the most that were under way."""
        self._messages: dict[asyncio.Task[None], list[_Call]] = {}
        self._ended: Exception | None = None
        self.needs_group = any(worker.needs_group for worker in workers)

    async def score(self, group: Group) -> Scores:
        return await self._call(group.task, group.episodes)

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        refuse_if_group_is_needed(self.needs_group)
        return (await self._call(task, (episode,)))[0]

    async def close(self) -> None:
        """Wake who waits for a worker, with `ChannelClosed`. The processes belong to the launcher."""
        if self._ended is None:
            self._end(ChannelClosed("the scorer pool is closed"))
        for message, calls in self._messages.items():
            if all(call.answer.done() for call in calls):
                message.cancel()

    async def lost(self, number: int, death: WorkerDied) -> None:
        """The process of a worker is gone, whether it had calls or not: have another there when this returns. Calls
        that it had learn of it by themselves. Raises what ended the pool."""
        place = self._places[number]
        process = place.process
        if process not in (place.dead, place.hung):
            place.dead = process
            if self._free.count(place) == place.concurrency:
                self._count_death(place, death)
        await self._replace(place, process)

    async def _call(self, task: Task, episodes: tuple[Episode, ...]) -> Scores:
        """A caller that gives up (its group has failed) leaves the worker to finish: to end the process would cost
        the calls behind it far more."""
        if self._ended is not None:
            raise self._ended
        call = _Call(ScoringRequest(task=task, episodes=episodes))
        self._waiting.append(call)
        self._under_way.add(call)
        try:
            self._send()
            return await call.answer
        finally:
            self._under_way.remove(call)

    def _send(self) -> None:
        """Give waiting calls to free workers."""
        self._send_suspect()
        free = [place for place in self._free if place is not self._apart]
        while free and self._waiting:
            calls = self._next_message(free[0], len(free))
            if not calls:
                return
            self._start(free.pop(0), calls)

    def _send_suspect(self) -> None:
        """Of those that have ended a process together: the next, once the worker that is kept for them is empty."""
        place = self._apart
        if place is None or self._free.count(place) < place.concurrency:
            return
        while self._suspects:
            call = self._suspects.popleft()
            if not call.answer.done():
                self._start(place, [call])
                return
        self._apart = None

    def _start(self, place: "_Place", calls: list["_Call"]) -> None:
        self._free.remove(place)
        message = asyncio.create_task(self._answer(place, calls))
        self._messages[message] = calls
        message.add_done_callback(self._messages.pop)

    def _next_message(self, place: "_Place", num_free: int) -> list["_Call"]:
        """The next calls, no more than a worker's share of those that wait and than a message should hold."""
        size = min(place.message_size, -(-len(self._waiting) // num_free))
        calls: list[_Call] = []
        num_bytes = 0
        while self._waiting and len(calls) < size:
            call = self._waiting[0]
            if call.answer.done():
                self._waiting.popleft()
                continue
            if size > 1:
                num_bytes += _num_bytes(call.request)
            if calls and (call.alone or num_bytes > MESSAGE_BYTES):
                break
            calls.append(self._waiting.popleft())
            if call.alone:
                break
        return calls

    async def _answer(self, place: "_Place", calls: list["_Call"]) -> None:
        try:
            for call, verdict in zip(calls, await self._score_on(place, calls), strict=True):
                call.settle(verdict)
        except _TryAlone:
            for call in reversed(calls):
                call.alone = True
                self._waiting.appendleft(call)
        except _ProcessDied as error:
            self._blame(place, calls, error.failure)
        except Exception as error:
            for call in calls:
                call.fail(error)
        finally:
            self._free.append(place)
            self._send()

    async def _score_on(self, place: "_Place", calls: list["_Call"]) -> Sequence[Verdict]:
        requests = [call.request for call in calls]
        while True:
            process = await self._ready(place)
            try:
                async with asyncio.timeout(self._timeout_s):
                    verdicts = await place.worker.score(requests)
            except TimeoutError:
                place.hung = process
                await self._replace(place, process)
                if len(calls) > 1:
                    raise _TryAlone from None
                raise timed_out(requests[0].task, self._timeout_s) from None
            except RequestRefused as error:
                if len(calls) > 1:
                    raise _TryAlone from None
                raise _too_large(requests[0], error) from error
            except (ScoringFailed, WorkerDied, ChannelClosed, RemoteError) as error:
                failure = _as_failure(error)
                if failure.reason != WORKER_DIED:
                    place.num_deaths = self._tasks_in_a_row = self._most_tasks = 0
                    raise failure from error
                if process == place.hung:
                    continue  # ended because of another message, that hung: this one is sent again
                place.dead = process
                await self._replace(place, process)
                raise _ProcessDied(failure) from error
            place.answered(verdicts)
            self._tasks_in_a_row = self._most_tasks = 0
            return verdicts

    async def _ready(self, place: "_Place") -> int:
        """The number of the process that a message may now go to."""
        async with place.changing:
            if self._ended is not None:
                raise self._ended
            return place.process

    async def _replace(self, place: "_Place", process: int) -> None:
        """Restart until it works; each time that it does not counts as a death. Of several messages that lost the
        same process, the first restarts it."""
        async with place.changing:
            while place.process == process:
                if self._ended is not None:
                    raise self._ended
                try:
                    async with asyncio.timeout(self._start_timeout_s):
                        await place.worker.restart(place.num_deaths)
                except TimeoutError:
                    late = WorkerDied(f"it was not ready within {self._start_timeout_s:g} s")
                    self._count_death(place, late)
                except (WorkerDied, ChannelClosed, RemoteError) as error:
                    self._count_death(place, error)
                else:
                    place.process += 1

    def _blame(self, place: "_Place", calls: list["_Call"], death: ScoringFailed) -> None:
        """A death counts against a call that was alone in the process, and in another one that died before."""
        for call in calls:
            call.num_deaths += 1
        if place is not self._apart or len(calls) > 1 or calls[0].num_deaths < DEATHS_OF_A_CULPRIT:
            self._suspects.extend(calls)
            self._apart = self._apart or place
            return
        if calls[0].answer.done():
            return  # its group has failed already, and is told of
        task = calls[0].request.task.id
        words = f"scoring task {task!r} ended its process twice, the last time alone in it: {death}"
        calls[0].fail(ScoringFailed(words, WORKER_DIED, death.detail))
        self._told(words)
        self._count_task(words, death)

    def _count_task(self, words: str, death: ScoringFailed) -> None:
        self._tasks_in_a_row += 1
        self._most_tasks = max(self._most_tasks, len({call.request.task.id for call in self._under_way}))
        if self._tasks_in_a_row >= max(self._max_deaths, self._most_tasks + 1) and self._ended is None:
            message = (
                f"{self._tasks_in_a_row} tasks in a row ended the process that scored them alone, and nothing was "
                f"scored between them; the last: {words}"
            )
            self._end(WorkerDied(message, detail=death.detail))

    def _count_death(self, place: "_Place", error: Exception) -> None:
        place.num_deaths += 1
        if place.num_deaths >= self._max_deaths and self._ended is None:
            message = (
                f"scoring worker {place.number} died at least {place.num_deaths} times in a row without scoring "
                f"anything; the last time: {error}"
            )
            self._end(WorkerDied(message, detail=getattr(error, "detail", "")))

    def _end(self, error: Exception) -> None:
        self._ended = error
        for call in (*self._waiting, *self._suspects):
            call.fail(error)
        self._waiting.clear()
        self._suspects.clear()


class _TryAlone(Exception):
    """One of several calls in a message hung or was too large: each is sent again, by itself."""


class _ProcessDied(Exception):
    """The process is gone, and another one has taken its place."""

    def __init__(self, failure: ScoringFailed) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Call:
    """What a caller waits for."""

    def __init__(self, request: ScoringRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self.alone = False
        self.num_deaths = 0
        """Of processes that it was in."""

    def settle(self, verdict: Verdict) -> None:
        if verdict.reason:
            self.fail(ScoringFailed(verdict.message, verdict.reason, verdict.detail))
        elif not self.answer.done():
            self.answer.set_result(verdict.scores)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Place:
    """A worker and what the pool knows of it."""

    def __init__(self, worker: ScoringWorker, number: int) -> None:
        self.worker = worker
        self.concurrency = worker.concurrency  # while a process is started nobody says
        self.number = number
        self.process = 0
        """Counts its processes."""
        self.hung = self.dead = -1
        """The last process that was ended because a call took too long; the last that died of itself."""
        self.num_deaths = 0
        self.changing = asyncio.Lock()
        self._call_s = MESSAGE_S

    @property
    def message_size(self) -> int:
        """Calls that it should answer in a moment."""
        return max(1, min(MAX_CALLS_IN_A_MESSAGE, int(MESSAGE_S / max(self._call_s, 1e-9))))

    def answered(self, verdicts: Sequence[Verdict]) -> None:
        self.num_deaths = 0
        mean_s = sum(verdict.seconds for verdict in verdicts) / len(verdicts)
        self._call_s = max(mean_s, self._call_s / 2)


def _as_failure(error: Exception) -> ScoringFailed:
    """What a worker raised, as the failure of its calls."""
    if isinstance(error, ScoringFailed):
        return error
    reason = SCORE_ERROR if isinstance(error, RemoteError) else WORKER_DIED
    return ScoringFailed(str(error), reason, getattr(error, "detail", ""))


def _too_large(request: ScoringRequest, error: RequestRefused) -> ScoringFailed:
    return ScoringFailed(
        f"scoring task {request.task.id!r} takes too large a message ({error}); make episodes shorter, or score "
        "each by itself where the reward takes a group",
        TOO_LARGE,
    )


def _num_bytes(request: ScoringRequest) -> int:
    """About what a request takes in a message. Columns of the task are not counted, since that would cost more than
    sending a message in vain."""
    total = RECORD_BYTES
    for episode in request.episodes:
        for turn in episode.turns:
            # Ids, logprobs and versions of its output tokens are three arrays of 4 bytes each.
            total += turn.prompt_ids.nbytes + 3 * turn.output_ids.nbytes + len(turn.text) + RECORD_BYTES
            total += RECORD_BYTES * (len(turn.sampling_masks) + len(turn.routing))
    return total
