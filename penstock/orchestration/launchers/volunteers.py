"""Node agents that come by themselves: somebody has typed `penstock worker --connect` on another machine."""

import asyncio

from penstock.channel import Channel


class Volunteer:
    """`remote.Placed`: the agent is there already."""

    def __init__(self, channel: Channel) -> None:
        self.channel: Channel | None = channel

    async def failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    def avoid(self) -> None:
        """Nobody is placed on it by us."""

    async def remove(self) -> None:
        if self.channel is not None:
            await self.channel.close()


class Volunteers:
    """`remote.Placer` that waits for people."""

    def __init__(self) -> None:
        self._waiting: list[Channel] = []
        self._arrived = asyncio.Event()

    def offer(self, channel: Channel) -> bool:
        """An agent has come; it is always taken."""
        self._waiting.append(channel)
        self._arrived.set()
        return True

    async def wait(self) -> None:
        """Until one has come that nobody has taken."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()

    async def place(
        self, name: str, incarnation: int, *, address: str, token: str, threads: int
    ) -> Volunteer:
        await self.wait()
        return Volunteer(self._waiting.pop(0))

    async def close(self) -> None:
        for channel in self._waiting:
            await channel.close()
