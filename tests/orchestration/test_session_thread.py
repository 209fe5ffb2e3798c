"""Fake sessions that interrupt their caller themselves, from inside the run, so that nothing depends on time."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import cast

import pytest

from penstock.orchestration.session_thread import run_in_thread, run_until_cancelled
from penstock.orchestration.summary import Summary


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """As in a terminal or a notebook; in a shell's background jobs they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SUMMARY = cast(Summary, object())


class Session:
    """Interrupts as often as it is told, each time after the answer to the last one, and ends when `until` is asked."""

    has_begun = True
    waits_for_room = False

    def __init__(self, until: str, interrupts: int = 0) -> None:
        self.asked: list[str] = []
        self.saved = False
        self._until = until
        self._interrupts = interrupts

    async def run(self) -> Summary:
        self._loop = asyncio.get_running_loop()
        self._answered = asyncio.Event()
        while self._until not in self.asked:
            if self._interrupts > len(self.asked):
                os.kill(os.getpid(), signal.SIGINT)
            await self._answered.wait()
            self._answered.clear()
        self.saved = True
        return SUMMARY

    def stop(self) -> None:
        self._ask("stop")

    def hurry(self) -> None:
        self._ask("hurry")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        self._loop.call_soon_threadsafe(self._answered.set)


@pytest.mark.parametrize(("until", "asked"), [("stop", ["stop"]), ("hurry", ["stop", "hurry"])])
def test_an_interrupted_caller_gets_the_summary(until: str, asked: list[str]) -> None:
    session, lines = Session(until, interrupts=3), list[str]()
    assert run_in_thread(session, lines.append) is SUMMARY
    assert session.asked == asked
    assert [line.split(":")[0] for line in lines] == ["Ctrl-C"] * len(asked)


def test_the_third_interrupt_ends_it() -> None:
    session = Session("never", interrupts=3)
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(session, lambda line: None)
    assert (session.asked, session.saved) == (["stop", "hurry"], False)


def test_an_error_of_the_run_is_the_callers() -> None:
    class Broken(Session):
        async def run(self) -> Summary:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_in_thread(Broken("stop"), lambda line: None)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run_until_cancelled(Broken("stop")))


@pytest.mark.parametrize(("until", "times", "saved"), [("hurry", 1, True), ("never", 2, False)])
def test_a_cancelled_task_saves_first_unless_it_is_cancelled_again(
    until: str, times: int, saved: bool
) -> None:
    session = Session(until)

    async def main() -> None:
        task = asyncio.create_task(run_until_cancelled(session))
        await asyncio.sleep(0)
        for _ in range(times):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (session.asked, session.saved) == (["hurry"], saved)
