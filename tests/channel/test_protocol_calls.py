"""A protocol is called in another process as its annotations say."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
import pytest

from penstock.channel import Channel, Method, implement, remote, serve
from penstock.channel.protocol_calls import methods_of
from penstock.errors import ChannelClosed, RemoteError, RequestRefused, TrainerLost
from penstock.records import Chunk
from tests.channel.test_connection import pair
from tests.records.builders import make_chunk


class Shelf(msgspec.Struct, frozen=True):
    books: tuple[str, ...]


class Library(Protocol):
    @property
    def is_open(self) -> bool: ...

    async def put(self, shelf: Shelf, *, at: int = 0, beside: Sequence[str] = ()) -> Shelf: ...

    async def burn(self, why: str) -> None: ...

    def read(self, count: int) -> AsyncIterator[Chunk]: ...

    async def close(self) -> None: ...


class Shelves:
    is_open = True

    def __init__(self) -> None:
        self.waits, self.cancelled = asyncio.Event(), asyncio.Event()

    async def put(self, shelf: Shelf, *, at: int = 0, beside: Sequence[str] = ()) -> Shelf:
        return Shelf((*shelf.books, str(at), *beside))

    async def burn(self, why: str) -> None:
        if why:
            raise RequestRefused(why) if why != "no reason" else KeyError(why)
        await self._until_cancelled()

    async def read(self, count: int) -> AsyncIterator[Chunk]:
        for number in range(count):
            yield make_chunk([number], logprobs=-number, versions=number)
        await self._until_cancelled()

    async def close(self) -> None:
        raise AssertionError("the other side closes its channel")

    async def _until_cancelled(self) -> None:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


class Place:
    """Where one process comes after the other."""

    present: Channel | None = None

    @property
    def channel(self) -> Channel:
        if self.present is None:
            raise ChannelClosed("nobody is there")
        return self.present


def test_arguments_defaults_and_answers_arrive_as_they_were() -> None:
    async def main() -> None:
        async with pair() as (left, right):
            serve(Library, Shelves(), right)
            library = remote(Library, left)
            assert await library.put(Shelf(("a",))) == Shelf(("a", "0"))
            assert await library.put(shelf=Shelf(()), beside=("b", "c"), at=2) == Shelf(("2", "b", "c"))
            with pytest.raises(TypeError):
                await library.put()  # type: ignore[call-arg]

    asyncio.run(main())


def test_what_is_of_another_type_is_refused_where_it_arrives() -> None:
    async def main() -> None:
        async with pair() as (left, right):
            serve(Library, Shelves(), right)
            with pytest.raises(RemoteError, match="ValidationError: Expected `str`, got `int`"):
                await remote(Library, left).burn(3)  # type: ignore[arg-type]
            right.serve(Method("library.put", methods_of(Library)["put"].request, int), _three)  # type: ignore[arg-type]
            with pytest.raises(RemoteError, match="the answer can't be read"):
                await remote(Library, left).put(Shelf(()))

    async def _three(request: object) -> int:
        return 3

    asyncio.run(main())


def test_errors_come_as_themselves_or_with_their_traceback() -> None:
    async def main() -> None:
        async with pair() as (left, right):
            serve(Library, Shelves(), right)
            with pytest.raises(RequestRefused, match="too hot"):
                await remote(Library, left).burn("too hot")
            with pytest.raises(RemoteError, match="KeyError: 'no reason'") as caught:
                await remote(Library, left).burn("no reason")
            assert "in burn" in caught.value.detail

    asyncio.run(main())


def test_cancelling_a_call_and_leaving_a_stream_cancel_the_work() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pair() as (left, right):
            shelves = Shelves()
            serve(Library, shelves, right)
            burning = asyncio.ensure_future(remote(Library, left).burn(""))
            await shelves.waits.wait()
            burning.cancel()
            await shelves.cancelled.wait()

            shelves.cancelled.clear()
            read = []
            async with aclosing(remote(Library, left).read(2)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    read.append(chunk.logprobs.tolist())
                    if len(read) == 2:
                        break
            assert read == [[0.0], [-1.0]]
            await shelves.cancelled.wait()

    asyncio.run(main())


def test_a_closed_channel_is_the_loss_that_its_part_knows() -> None:
    async def main() -> None:
        place = Place()
        library = remote(Library, place, lost=TrainerLost)
        with pytest.raises(TrainerLost, match="nobody is there"):
            await library.burn("")
        async with asyncio.timeout(30), pair() as (left, right):
            place.present, shelves = left, Shelves()
            serve(Library, shelves, right)
            burning = asyncio.ensure_future(library.burn(""))
            await shelves.waits.wait()
            await right.close()
            with pytest.raises(TrainerLost, match=r"library\.burn: the other process is gone"):
                await burning
            with pytest.raises(ChannelClosed) as plain:
                await remote(Library, left).burn("")
            assert type(plain.value) is ChannelClosed
        async with pair() as (left, right):  # the next process in this place
            place.present = left
            serve(Library, Shelves(), right)
            assert await library.put(Shelf(())) == Shelf(("0",))

    asyncio.run(main())


def test_close_without_a_process_fails_when_it_is_awaited() -> None:
    """So that one of several that are closed together costs no other."""

    async def main() -> None:
        (outcome,) = await asyncio.gather(remote(Library, Place()).close(), return_exceptions=True)
        assert isinstance(outcome, ChannelClosed)

    asyncio.run(main())


def test_close_closes_the_channel_and_properties_stay_behind() -> None:
    async def main() -> None:
        async with pair() as (left, right):
            serve(Library, Shelves(), right)
            library = remote(Library, left)
            await library.close()
            assert left.closed
            assert not hasattr(library, "is_open")

    asyncio.run(main())


def test_what_a_part_does_itself_stands_before_what_is_made() -> None:
    async def burn(why: str) -> None:
        raise RequestRefused(f"not {why}")

    async def main() -> None:
        async with pair() as (left, right):
            serve(Library, Shelves(), right)
            library = remote(Library, left, burn=burn)
            with pytest.raises(RequestRefused, match="not here"):
                await library.burn("here")
            assert await library.put(Shelf(())) == Shelf(("0",))

    asyncio.run(main())
    named = implement(Library, lambda name: lambda *args: (name, args))
    assert named.read(3) == ("read", (3,))  # type: ignore[comparison-overlap]


def test_a_method_that_is_neither_a_call_nor_a_stream_is_refused() -> None:
    class Plain(Protocol):
        def now(self) -> float: ...

    with pytest.raises(TypeError, match=r"Plain\.now must be a coroutine or return an AsyncIterator"):
        methods_of(Plain)
