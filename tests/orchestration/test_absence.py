"""Why a process is no longer there, in virtual time."""

import asyncio
from typing import Any

from penstock.observe.pulse import PulseReport
from penstock.orchestration.absence import Absence
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.orchestration.virtual_time import run_in_virtual_time
from tests.orchestration.test_pooled_workers import Processes


class Silent:
    """Nobody has ever answered."""

    def pulse(self, channel: object) -> tuple[int, PulseReport]:
        return 0, PulseReport(phase="scoring")


async def a_place(processes: Processes) -> ReplaceableWorker:
    launcher: Any = processes
    place: ReplaceableWorker = ReplaceableWorker(launcher, "scorer0", start=lambda channel: asyncio.sleep(0))
    await place.start()
    return place


def test_who_asks_why_a_frozen_worker_is_gone_learns_that_it_was_frozen() -> None:
    async def main() -> None:
        place, loop, pulses = await a_place(Processes()), asyncio.get_running_loop(), Silent()
        absence = Absence(place, loop.time, pulses=pulses, freeze_s=10.0)  # type: ignore[arg-type]
        watching, asking = asyncio.create_task(absence.wait()), asyncio.create_task(place.gone())
        begun = loop.time()
        assert str(await asking) == str(await watching)
        assert str(await watching).startswith(
            "worker scorer0 is frozen, so it was ended: it has not answered for 1"
        )
        assert 10.0 < loop.time() - begun < 11.1

    run_in_virtual_time(main())


def test_without_a_limit_nobody_is_frozen() -> None:
    async def main() -> None:
        processes = Processes()
        place, loop, pulses = await a_place(processes), asyncio.get_running_loop(), Silent()
        watching = asyncio.create_task(Absence(place, loop.time, pulses=pulses).wait())  # type: ignore[arg-type]
        await asyncio.sleep(10_000.0)
        assert not watching.done()
        processes.all[0].end()
        assert str(await watching) == "worker scorer0 was killed by SIGKILL"

    run_in_virtual_time(main())
