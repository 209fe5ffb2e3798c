"""The log that deletes blobs passes everything on, and deletes once a group has ended."""

import asyncio

from penstock.blobs import MemoryBlobs
from penstock.buffer.admission import Ticket
from penstock.buffer.blob_cleanup import CleaningLog
from penstock.buffer.group_log import MemoryGroupLog
from penstock.types import Task, group_scope
from tests.buffer.test_admission import scored


def test_blobs_go_after_the_end_was_logged() -> None:
    blobs, log = MemoryBlobs(), MemoryGroupLog()
    cleaning = CleaningLog(log, blobs)

    async def live() -> None:
        for number in range(3):
            ticket = Ticket(number=number, bound=1, deadline=1)
            await cleaning.admitted(ticket, Task(id=str(number), prompt=""))
            blobs.put(f"{group_scope(number)}/a", b"1")
            await cleaning.finished(ticket, scored(number, [0]))
        assert len(blobs.scopes) == 3
        await cleaning.trained(1, [0])
        await cleaning.dropped(2, "stale")

    asyncio.run(live())
    assert set(blobs.scopes) == {"group-1"}
    assert log.counts() == {"trained": 1, "scored": 1, "dropped": 1}
