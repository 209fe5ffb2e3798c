"""Weights between two processes of one's own: this one trains, the other one serves.

An update is a small record: where the weights lie, and what they must hash to. Here it travels over pipes."""

import asyncio
import sys

import msgspec

import penstock
from penstock.records import UpdateReceipt, WeightUpdate


async def serve() -> None:
    async with penstock.open_engine("builtin", max_context=64) as engine:
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            receipt = await engine.update(msgspec.json.decode(line, type=WeightUpdate))
            print(msgspec.json.encode(receipt).decode(), flush=True)


async def main(steps: int = 3) -> list[int]:
    pipe, versions = asyncio.subprocess.PIPE, []
    server = await asyncio.create_subprocess_exec(sys.executable, __file__, "serve", stdin=pipe, stdout=pipe)
    assert server.stdin is not None and server.stdout is not None
    async with penstock.open_engine() as sampler, penstock.open_trainer(learning_rate=1e-3) as trainer:
        for _ in range(steps):
            answers = [await sampler.answer("121+314=", max_tokens=5) for _ in range(4)]
            await trainer.step([penstock.ScoredGroup.of(answers, [0.0, 1.0, 0.0, 1.0])])
            async with trainer.published() as update:
                server.stdin.write(msgspec.json.encode(update) + b"\n")
                receipt = msgspec.json.decode(await server.stdout.readline(), type=UpdateReceipt)
            versions.append(receipt.version)
            print(f"it serves version {receipt.version}, verified in {receipt.verify_s * 1e3:.1f} ms")
    server.stdin.close()
    await server.wait()
    return versions


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1:] == ["serve"] else main())
