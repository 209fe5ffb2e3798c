"""Represents the server that an engine works with: a process of our own, or one that was joined."""

import asyncio
from collections.abc import Callable

from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.server_process import ServerProcess
from penstock.engines.vllm.weight_calls import WeightCalls
from penstock.errors import EngineLost, UserError


class Server:
    """Holds the client of a server and the calls for weights that `connect` makes for it. Without a `process`
    the server was joined: it is neither watched, nor restarted, nor ended."""

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
        """Wait until the server ends, and return the error. For a joined server this never returns."""
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        return await self._process.died()

    async def restart(self, version: int) -> None:
        """Start a new process for one that has ended, and label its weights with `version`. Raise `UserError` if no
        restart is left."""
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
        """End a server that can't be used any more, for the watcher to start another. A joined server stays
        paused until it gets full weights."""
        if self._process is not None:
            await self._process.stop()

    async def close(self) -> None:
        await self.client.close()
        if self._process is not None:
            await self._process.stop()
            self._process.remove()
