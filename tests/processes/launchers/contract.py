"""What every launcher must do. A test module subclasses `LauncherContract` and says how to open one."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.channel import Method
from penstock.errors import ChannelClosed, RemoteError
from penstock.processes.launchers import Launcher

NOTHING = Method("nothing.such", int, int)


def where_it_shows(token: str) -> list[str]:
    """Files in which any program of this user can read the token."""
    found = []
    for process in Path("/proc").iterdir():
        for name in ("environ", "cmdline") if process.name.isdecimal() else ():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if token.encode() in (process / name).read_bytes():
                    found.append(str(process / name))
    return found


class LauncherContract:
    """Subclasses give `open_launcher()`: workers of it answer any call with an error until they are told what
    they are."""

    def open_launcher(self) -> AbstractAsyncContextManager[Launcher]:
        raise NotImplementedError

    def play(self, scene: Callable[[Launcher], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), self.open_launcher() as launcher:
                await scene(launcher)

        asyncio.run(main())

    def test_a_worker_answers_over_its_channel(self) -> None:
        async def scene(launcher: Launcher) -> None:
            worker = await launcher.launch("one")
            assert worker.name == "one"
            with pytest.raises(RemoteError, match=r"no such method: nothing\.such"):
                await worker.channel.call(NOTHING, 1)

        self.play(scene)

    def test_a_killed_worker_is_gone_and_its_end_is_told(self) -> None:
        async def scene(launcher: Launcher) -> None:
            worker = await launcher.launch("one")
            dying = asyncio.create_task(worker.died())
            await worker.kill()
            assert "worker one" in str(await dying)
            assert "killed" in str(await worker.died())
            with pytest.raises(ChannelClosed):
                await worker.channel.call(NOTHING, 1)

        self.play(scene)

    def test_a_name_can_be_used_again(self) -> None:
        async def scene(launcher: Launcher) -> None:
            first = await launcher.launch("one")
            await first.kill()
            launcher.forget(first)
            second = await launcher.launch("one")
            with pytest.raises(RemoteError):
                await second.channel.call(NOTHING, 1)

        self.play(scene)

    def test_its_folder_is_there_while_it_is_open(self) -> None:
        async def main() -> None:
            async with self.open_launcher() as launcher:
                folder = launcher.folder
                assert folder.is_dir()
            assert not folder.exists()

        asyncio.run(main())
