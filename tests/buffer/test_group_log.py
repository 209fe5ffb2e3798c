import asyncio

import pytest

from penstock.buffer.admission import Ticket
from penstock.buffer.group_log import MemoryGroupLog
from penstock.types import Task


def test_the_log_in_memory_refuses_what_the_life_of_a_group_does_not_have() -> None:
    async def scene() -> None:
        log = MemoryGroupLog()
        ticket = Ticket(number=4, bound=1, deadline=1)
        await log.admitted(ticket, Task(id="t4", prompt="p"))
        with pytest.raises(ValueError, match="group 4 is running, so it can't become trained"):
            await log.trained(1, [4])
        await log.dropped(4, "refused")
        with pytest.raises(ValueError, match="group 4 is dropped, so it can't become dropped"):
            await log.dropped(4, "refused")
        with pytest.raises(ValueError, match="group 4 was admitted before, with task 't4'"):
            await log.admitted(ticket, Task(id="t4", prompt="p"))

    asyncio.run(scene())
