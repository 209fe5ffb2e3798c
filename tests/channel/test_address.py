import asyncio
from pathlib import Path

import pytest

from penstock.channel import Channel, address
from penstock.channel.address import Hello, Listener, connect


def test_who_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "GREETING_S", 0.05)

    async def main() -> str:
        arrived: asyncio.Future[tuple[str, Channel]] = asyncio.get_running_loop().create_future()

        def accept(name: str, channel: Channel) -> bool:
            arrived.set_result((name, channel))
            return True

        listener = Listener(f"unix:{tmp_path / 's'}", "token", accept)
        await listener.start()
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            assert await reader.read() == b""
            writer.close()
            channel = await connect(listener.address, Hello(name="one", token="token"))
            name, accepted = await arrived
        await channel.close()
        await accepted.run()
        await listener.close()
        return name

    assert asyncio.run(main()) == "one"
