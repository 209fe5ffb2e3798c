"""A server that an engine works with: its own process, or one that somebody else runs."""

import asyncio
from collections.abc import Callable

from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.server_process import ServerProcess
from penstock.engines.vllm.weight_calls import WeightCalls
from penstock.errors import EngineLost, UserError


class Server:
    """`connect` makes the calls for weights to a client. Without a `process` it is somebody else's: it is not
    watched, not started again and not ended."""

    def __init__(
        self,
        client: ServerClient,
        connect: Callable[[ServerClient], WeightCalls],
        *,
        process: ServerProcess | None = None,
        restarts: int = 0,
    ) -> None:
        self.client = client
        self.weights = connect(client)
        self._connect = connect
        self._process = process
        self._restarts = restarts

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def died(self) -> EngineLost:
        """Wait until it ends."""
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        return await self._process.died()

    async def restart(self, version: int) -> None:
        """Start another process in the place of one that has ended. Its weights are known as `version`."""
        assert self._process is not None
        if self._restarts == 0:
            raise UserError(f"{self.client.name}: its vLLM server has died too often (engine.vllm.restarts)")
        self._restarts -= 1
        await self._process.start()
        await self.client.close()
        self.client = ServerClient(self.client.name, self._process.url)
        self.weights = self._connect(self.client)
        await self.weights.open(version)

    async def kill(self) -> None:
        """It can't be used any more. Whoever watches it starts another; one that is somebody else's stays paused
        until it gets whole weights."""
        if self._process is not None:
            await self._process.stop()

    async def close(self) -> None:
        await self.client.close()
        if self._process is not None:
            await self._process.stop()
            self._process.remove()
