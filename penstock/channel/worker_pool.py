"""Sends calls to worker processes: the least loaded takes the next ones, and one that hangs or dies is replaced.

A bad call fails alone. When a process dies, its calls run again apart from others,
half by half, until the culprit is found (`penstock.channel.suspects`). A worker that dies again and again
without a call ends the pool. So does a series of tasks that end their process without any answer in between,
once there are more of them than ran at the same time: fewer may simply all be bad.

Where answers say how long they took, calls that wait while every worker is busy are sent several in a
message, as many as a worker answers within `MESSAGE_S`. So calls of microseconds do not wait for a round trip
each, and a slow call is sent alone.
"""

import asyncio
import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic

from penstock.channel.pooled_calls import Answer, AskedCall, Call, CallKind, CallLost, PoolSlot, PoolWorker
from penstock.channel.suspects import Half, Suspects
from penstock.errors import ChannelClosed, OutOfMemory, RemoteError, RequestRefused, WorkerDied

MAX_DEATHS_IN_A_ROW = 5
START_S = 120.0
"""How long a worker may take to restart."""
MESSAGE_BYTES = 8 << 20
"""Approximate size limit of a message of several calls. A single call is never split."""


class WorkerPool(Generic[Call, Answer]):
    """Holds workers that are already started, each with the number of messages that it takes at once. `report` is
    called for each task that is found to end its process."""

    def __init__(
        self,
        workers: Sequence[tuple[PoolWorker[Call, Answer], int]],
        kind: CallKind[Call, Answer],
        *,
        start_s: float = START_S,
        max_deaths: int = MAX_DEATHS_IN_A_ROW,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        if not workers:
            raise ValueError(f"a pool needs at least one {kind.worker} worker, got none")
        self._slots = [PoolSlot(worker, count, number) for number, (worker, count) in enumerate(workers)]
        self._kind = kind
        self._start_s = start_s
        self._max_deaths = max_deaths
        self._report = report
        self._waiting: list[AskedCall[Call, Answer]] = []
        """In the order in which they came, including those that run again."""
        self._numbers = itertools.count()
        self._suspects = Suspects[AskedCall[Call, Answer]]()
        self._groups: Counter[object] = Counter()
        """How many calls of each task are unfinished."""
        self._tasks_in_a_row = self._most_tasks = 0
        """Tasks that ended their process since a call was last answered, and the most that were unfinished
        meanwhile."""
        self._changed = asyncio.Event()
        self._ended: Exception | None = None

    async def ask(self, call: Call) -> Answer:
        """Return the answer. Raise `CallLost` if the call itself prevents one, or the error that ended the pool."""
        if self._ended is not None:
            raise self._ended
        group, index, words = self._kind.task(call)
        attempt: AskedCall[Call, Answer] = AskedCall(group, index, words, call, next(self._numbers))
        self._groups[attempt.group] += 1
        if self._may_run(attempt):
            self._waiting.append(attempt)
        self._send()
        try:
            return await attempt.answer
        finally:
            self._forget(attempt)

    async def close(self) -> None:
        """Wake callers that wait for a worker, with `ChannelClosed`. The processes belong to the launcher."""
        if self._ended is None:
            self._end(ChannelClosed(f"the pool of {self._kind.worker} workers is closed"))
        for slot in self._slots:
            for message, attempts in slot.messages.items():
                if all(attempt.answer.done() for attempt in attempts):
                    message.cancel()
        restarting = [slot.restarting for slot in self._slots if slot.restarting is not None]
        for restart in restarting:
            restart.cancel()
        await asyncio.gather(*restarting, return_exceptions=True)

    async def lost(self, number: int, death: WorkerDied) -> None:
        """Replace a worker whose process is gone, whether it had calls or not, and return when the new process is
        ready. Its calls learn of the death by themselves. Raise the error that ended the pool, if one has."""
        slot = self._slots[number]
        slot.is_missed = True
        if not slot.is_broken:
            self._note_death(slot, death)
        self._send()
        while slot.is_broken:
            if self._ended is not None:
                raise self._ended
            self._changed.clear()
            await self._changed.wait()

    def _forget(self, attempt: AskedCall[Call, Answer]) -> None:
        """Remove a call that has ended, or whose caller has given up."""
        self._groups[attempt.group] -= 1
        if not self._groups[attempt.group]:
            del self._groups[attempt.group]
            self._suspects.forget(attempt.group)
        if attempt.message is None:
            self._suspects.clear(attempt)
            with contextlib.suppress(ValueError):
                self._waiting.remove(attempt)
        elif not self._kind.leaves:
            attempt.message.cancel()
        self._send()

    def _send(self) -> None:
        """Give waiting calls to workers that have room, and replace those that are broken and empty."""
        self._changed.set()
        if self._ended is not None:
            return
        for slot in self._slots:
            if slot.is_broken and slot.is_idle and (self._waiting or slot.is_missed):
                slot.restarting = asyncio.create_task(self._restart(slot))
        while self._waiting and (self._send_suspect() or self._send_message()):
            pass

    def _send_suspect(self) -> bool:
        """Send a suspect. Suspects keep an empty worker to themselves, and take it before all other calls."""
        for slot in self._slots:
            half = slot.half or (None if slot.messages else self._next_half())
            if half is None or not slot.room:
                continue
            ready = (one for one in half.members if one.message is None and not one.answer.done())
            if (attempt := next(ready, None)) is None:
                continue
            self._waiting.remove(attempt)
            half.is_running = True
            slot.half = half
            self._start(slot, [attempt])
            return True
        return False

    def _next_half(self) -> "Half[AskedCall[Call, Answer]] | None":
        """Return the suspects that get the next empty worker. Of several workers, one always serves all other
        calls."""
        if not self._suspects.halves:
            return None
        num_apart = sum(slot.half is not None for slot in self._slots)
        if num_apart >= max(1, len(self._slots) - 1):
            return None
        return next((half for half in self._suspects.halves if not half.is_running), None)

    def _send_message(self) -> bool:
        is_for_all = self._next_half() is None
        free = [p for p in self._slots if p.room and p.half is None and (p.messages or is_for_all)]
        if not free:
            return False
        slot = min(free, key=lambda one: (len(one.messages), one.last_number))
        attempts = self._next_message(slot, sum(one.room for one in free))
        if attempts:
            self._start(slot, attempts)
        return bool(attempts)

    def _next_message(self, slot: PoolSlot[Call, Answer], room: int) -> list[AskedCall[Call, Answer]]:
        """Take the next calls that are not suspects: no more than a worker's share of the waiting ones, and no
        more than a message should hold."""
        size = 1 if self._kind.seconds is None else min(slot.message_size, -(-len(self._waiting) // room))
        taken: list[AskedCall[Call, Answer]] = []
        num_bytes = at = 0
        while at < len(self._waiting) and len(taken) < size:
            attempt = self._waiting[at]
            if attempt.half is not None and not attempt.answer.done():
                at += 1
                continue
            if size > 1:
                num_bytes += self._kind.num_bytes(attempt.call)
            if taken and (attempt.is_alone or num_bytes > MESSAGE_BYTES):
                break
            del self._waiting[at]
            if not attempt.answer.done():
                taken.append(attempt)
                if attempt.is_alone:
                    break
        return taken

    def _may_run(self, attempt: AskedCall[Call, Answer]) -> bool:
        """Return whether the call may run; fail it if others of its task have ended their process."""
        self._suspects.judge(attempt)
        if attempt.failure:
            self._suspects.clear(attempt)
            attempt.fail(CallLost(attempt.failure, attempt.detail))
        return not attempt.failure

    def _start(self, slot: PoolSlot[Call, Answer], attempts: list[AskedCall[Call, Answer]]) -> None:
        message = asyncio.create_task(self._run(slot, attempts))
        slot.messages[message] = attempts
        slot.last_number = attempts[0].number
        for attempt in attempts:
            attempt.message = message
        message.add_done_callback(lambda done: self._left(slot, done, attempts))

    def _left(
        self,
        slot: PoolSlot[Call, Answer],
        message: "asyncio.Task[None]",
        attempts: list[AskedCall[Call, Answer]],
    ) -> None:
        """Free the slot of an ended message. Requeue its unanswered calls, or fail those that may not run again."""
        del slot.messages[message]
        if slot.half is not None and not slot.messages:
            slot.half.is_running = False
            slot.half = None
        for attempt in attempts:
            attempt.message = None
            if self._ended is not None and not attempt.failure:
                attempt.fail(self._ended)
            if attempt.answer.done():
                self._suspects.clear(attempt)
            elif self._may_run(attempt):
                bisect.insort(self._waiting, attempt, key=lambda one: one.number)
        self._send()

    async def _run(self, slot: PoolSlot[Call, Answer], attempts: list[AskedCall[Call, Answer]]) -> None:
        calls = [attempt.call for attempt in attempts]
        try:
            async with asyncio.timeout(self._kind.limit_s(calls[0])):
                answers = await slot.worker.answer(calls)
        except TimeoutError:
            await self._end_late(slot, attempts)
        except (WorkerDied, ChannelClosed) as error:
            self._note_death(slot, error)
        except RequestRefused as error:  # too large a message
            self._try_alone(attempts, error)
        except Exception as error:
            self._count_answer(slot)
            for attempt in attempts:
                attempt.fail(error)
        else:
            self._count_answer(slot)
            for attempt, answer in zip(attempts, answers, strict=True):
                attempt.settle(answer)
                slot.is_broken = slot.is_broken or self._kind.spoils(answer)
            if self._kind.seconds is not None:
                slot.took(sum(map(self._kind.seconds, answers)) / len(answers))

    async def _end_late(self, slot: PoolSlot[Call, Answer], attempts: list[AskedCall[Call, Answer]]) -> None:
        if slot.is_dead:
            return
        late = CallLost(self._kind.late(attempts[0].call), is_late=True)
        is_known = self._kind.blames_late or len(slot.messages) == 1
        if is_known:
            slot.is_broken = slot.is_dead = True  # its other calls run again, and are not suspected
        else:
            self._note_death(slot, WorkerDied(str(late)))
        await slot.worker.end()
        if is_known:
            self._try_alone(attempts, late)

    def _try_alone(self, attempts: list[AskedCall[Call, Answer]], error: Exception) -> None:
        """Send each call alone next time, since one of them is the cause. A call that already was alone fails."""
        for attempt in attempts:
            if len(attempts) == 1:
                attempt.fail(error)
            attempt.is_alone = True

    async def _restart(self, slot: PoolSlot[Call, Answer]) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await slot.worker.restart(slot.num_deaths)
        except TimeoutError:
            self._count_death(slot, WorkerDied(f"it was not ready within {self._start_s:g} s"))
        except (WorkerDied, ChannelClosed, RemoteError, OutOfMemory) as error:
            self._count_death(slot, error)
        except Exception as error:  # the user must fix this: a retry would not help
            if self._ended is None:
                self._end(error)
        else:
            slot.is_broken = slot.is_dead = slot.is_missed = False
        finally:
            slot.restarting = None
            self._send()

    def _note_death(self, slot: PoolSlot[Call, Answer], error: Exception) -> None:
        """Record a death once, although each of the worker's calls notices it."""
        if slot.is_dead:
            return
        slot.is_broken = slot.is_dead = True
        if not slot.messages:
            self._count_death(slot, error)
        had = [one for attempts in slot.messages.values() for one in attempts if not one.answer.done()]
        if had and (deed := self._suspects.died(had, slot.half, str(error))) is not None:
            self._report(deed)
            self._count_task(deed, error)
        for attempt in had:
            attempt.detail = getattr(error, "detail", "")
        self._waiting = [attempt for attempt in self._waiting if self._may_run(attempt)]

    def _count_answer(self, slot: PoolSlot[Call, Answer]) -> None:
        slot.num_deaths = self._tasks_in_a_row = self._most_tasks = 0

    def _count_task(self, deed: str, error: Exception) -> None:
        self._tasks_in_a_row += 1
        self._most_tasks = max(self._most_tasks, len(self._groups))
        if self._tasks_in_a_row >= max(self._max_deaths, self._most_tasks + 1):
            self._give_up(
                f"{self._tasks_in_a_row} tasks in a row ended the process that they had to themselves, and no call "
                f"was answered between them; the last: {deed}; {self._kind.advice}",
                error,
            )

    def _count_death(self, slot: PoolSlot[Call, Answer], error: Exception) -> None:
        slot.num_deaths += 1
        if slot.num_deaths >= self._max_deaths:
            self._give_up(
                f"{self._kind.worker} worker {slot.number} died {slot.num_deaths} times in a row without an "
                f"answer; the last time: {error}",
                error,
            )

    def _give_up(self, message: str, error: Exception) -> None:
        if self._ended is None:
            self._end(WorkerDied(message, detail=getattr(error, "detail", "")))

    def _end(self, error: Exception) -> None:
        self._ended = error
        for attempt in self._waiting:
            attempt.fail(error)
        self._waiting.clear()
        self._send()
