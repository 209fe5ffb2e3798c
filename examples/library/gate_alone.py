"""The gate and the buffer alone: bounded staleness for a generator and a trainer of one's own.

Sleeps stand for work."""

import asyncio

import numpy as np

import penstock
from penstock.buffer.admission import StalenessGate
from penstock.buffer.rollout_buffer import RolloutBuffer
from penstock.types import SamplingParams, Turn


async def generate(buffer: RolloutBuffer) -> None:
    while True:
        ticket = await buffer.admit()  # as soon as the bound allows one more group
        version = buffer.gate.history.newest  # what the engine serves
        await asyncio.sleep(0.001 * (1 + ticket.number % 5))
        ids, logprobs = np.array([1, 2], dtype=np.int32), np.zeros(2, dtype=np.float32)
        turn = Turn(
            prompt_ids=ids, output_ids=ids, logprobs=logprobs, versions=np.full(2, version, dtype=np.int32),
            finish_reason="stop", sampling=SamplingParams(), text="",
        )  # fmt: skip
        await buffer.finish(ticket, penstock.ScoredGroup.of([turn, turn], [0.0, 1.0], number=ticket.number))


async def main(steps: int = 20) -> list[int]:
    buffer, ages = RolloutBuffer(StalenessGate(groups_per_step=4, max_staleness=2, late="wait")), []
    history = buffer.gate.history
    history.issue(0)
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(generate(buffer)) for _ in range(8)]
        for step in range(steps):
            taken = await buffer.take_step()
            ages.append(max(step - group.oldest_step for group in taken.groups))
            await asyncio.sleep(0.002)  # the optimizer step
            history.issue(step + 1)
            await buffer.trained(taken)
            buffer.served(history.newest)
        for worker in workers:
            worker.cancel()
    print(f"{steps} steps; the oldest tokens of a step were {max(ages)} updates old, the bound is 2")
    return ages


if __name__ == "__main__":
    asyncio.run(main())
