import asyncio

import pytest

from penstock.errors import PenstockError, UpdateAbandoned
from penstock.orchestration.broadcast import send_and_take
from penstock.types import UpdateReceipt

RECEIPT = UpdateReceipt(policy="policy", version=3, stall_s=0.0, verify_s=0.0)


class Side:
    """Ends when it is told to, with a result or an error, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.end: asyncio.Future[UpdateReceipt | None] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False

    async def act(self):
        try:
            return await self.end
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def begin():
    send, take = Side(), Side()
    both = asyncio.ensure_future(send_and_take(send.act(), take.act()))
    await asyncio.sleep(0)
    return send, take, both


def test_both_sides_end_it() -> None:
    async def main() -> None:
        send, take, both = await begin()
        send.end.set_result(None)
        await asyncio.sleep(0)
        assert not both.done()
        take.end.set_result(RECEIPT)
        assert await both is RECEIPT

    asyncio.run(main())


def test_engines_that_fail_cancel_the_sender() -> None:
    async def main() -> None:
        send, take, both = await begin()
        take.end.set_exception(PenstockError("engine1 is gone"))
        with pytest.raises(PenstockError, match="engine1 is gone"):
            await both
        assert send.was_cancelled

    asyncio.run(main())


def test_the_error_of_who_failed_first_leaves() -> None:
    async def main() -> None:
        send, take, both = await begin()
        send.end.set_exception(PenstockError("connection closed"))
        take.end.set_exception(UpdateAbandoned("the sender failed"))
        with pytest.raises(PenstockError, match="connection closed"):
            await both

    asyncio.run(main())


def test_cancelling_it_cancels_both() -> None:
    async def main() -> None:
        send, take, both = await begin()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        assert send.was_cancelled and take.was_cancelled

    asyncio.run(main())
