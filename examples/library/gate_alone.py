"""The gate and the buffer alone: bounded staleness for a generator and a trainer of one's own."""

import asyncio

import numpy as np

from penstock.loop.admission import StalenessGate
from penstock.loop.rollout_buffer import RolloutBuffer
from penstock.records import SamplingParams, ScoredGroup, Turn


async def generate(buffer: RolloutBuffer) -> None:
    while True:
        ticket = await buffer.admit()  # as soon as the bound allows one more group
        ids, version = np.array([1, 2], dtype=np.int32), buffer.gate.history.newest  # what the engine serves
        await asyncio.sleep(0.001 * (1 + ticket.number % 5))  # the engine's work
        turn = Turn(prompt_ids=ids, output_ids=ids, logprobs=np.zeros(2, dtype=np.float32), text="",
                    versions=ids * 0 + version, finish_reason="stop", sampling=SamplingParams())  # fmt: skip
        await buffer.finish(ticket, ScoredGroup.of([turn, turn], [0.0, 1.0], number=ticket.number))


async def main(steps: int = 20) -> list[int]:
    buffer, ages = RolloutBuffer(StalenessGate(groups_per_step=4, max_staleness=2, late="wait")), []
    buffer.gate.history.issue(0)
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(generate(buffer)) for _ in range(8)]
        for step in range(steps):
            taken = await buffer.take_step()
            ages.append(max(step - group.oldest_step for group in taken.groups))
            await asyncio.sleep(0.002)  # the optimizer step
            buffer.gate.history.issue(step + 1)
            await buffer.trained(taken)
            buffer.served(step + 1)
        for worker in workers:
            worker.cancel()
    return ages


if __name__ == "__main__":
    print("the oldest tokens of each step, in steps; the bound is 2:", asyncio.run(main()))
