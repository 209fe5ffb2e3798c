import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from penstock.run.interruption import asking


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """Whoever starts the tests in the background may have them ignored."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class StoppableRun:
    def __init__(self, *, has_begun: bool = True, waits_for_room: bool = False) -> None:
        self.asked: list[str] = []
        self.waits_for_room = waits_for_room
        self.has_begun = has_begun

    def stop(self) -> None:
        self.asked.append("stop")

    def cancel(self) -> None:
        self.asked.append("cancel")


async def send(number: signal.Signals, lines: list[str]) -> None:
    """Send this process a signal, and wait for the line that it is answered with."""
    before = len(lines)
    os.kill(os.getpid(), number)
    async with asyncio.timeout(60):
        while len(lines) == before:  # noqa: ASYNC110  (the kernel chooses when a signal comes)
            await asyncio.sleep(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_stops_the_second_cancels_and_the_third_ends(number: signal.Signals) -> None:
    run, lines = StoppableRun(), []

    async def main() -> None:
        with asking(run, lines.append, end=lambda: run.asked.append("end")):
            for _ in range(3):
                await send(number, lines)

    before = signal.getsignal(number)
    asyncio.run(main())
    assert run.asked == ["stop", "cancel", "end"]
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert [line.split(":")[0] for line in lines] == [name] * 3
    assert "the model will be saved" in lines[0]
    assert "the model will still be saved" in lines[1]
    assert "the model is not saved" in lines[2]
    assert signal.getsignal(number) == before


def test_before_anything_is_trained_no_model_is_promised() -> None:
    run, lines = StoppableRun(has_begun=False), []

    async def main() -> None:
        with asking(run, lines.append, end=lambda: None):
            for _ in range(2):
                await send(signal.SIGINT, lines)

    asyncio.run(main())
    assert lines == [
        "Ctrl-C: ending; nothing has been trained since the start, so no model is saved",
        "Ctrl-C: still ending, without a model (once more to end at once)",
    ]


def test_on_a_full_disk_no_model_is_promised() -> None:
    run, lines = StoppableRun(waits_for_room=True), []

    async def main() -> None:
        with asking(run, lines.append, end=lambda: None):
            await send(signal.SIGTERM, lines)

    asyncio.run(main())
    assert run.asked == ["stop"]
    assert lines == ["SIGTERM: waiting no longer for room on the disk; the model is tried once more"]


def test_what_nohup_ignores_stays_ignored() -> None:
    run, lines = StoppableRun(), []

    async def main() -> None:
        with asking(run, lines.append, end=lambda: None):
            os.kill(os.getpid(), signal.SIGHUP)
            await send(signal.SIGTERM, lines)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.asked == ["stop"]
    assert [line.split(":")[0] for line in lines] == ["SIGTERM"]
