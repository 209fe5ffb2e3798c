"""What a large step costs the controller: groups are planned and sent through a real channel to another process.

    python tools/large_plan.py [--sequences 4096] [--tokens 4096]

Prints seconds, those of the controller's own CPU time among them, and the peak resident memory of both sides.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from penstock.channel import Channel, implement
from penstock.channel.address import Listener, connect
from penstock.records import (
    Episode,
    Group,
    SamplingParams,
    Score,
    ScoredGroup,
    StepPlan,
    StepResult,
    Task,
    Turn,
)
from penstock.records.interfaces import Trainer
from penstock.records.metrics import Sum
from penstock.trainer.plan_transfer import remote_trainer, serve_trainer
from penstock.trainer.step.packing import plan_step

GROUP_SIZE, PROMPT = 16, 128


def make_groups(num_sequences: int, num_tokens: int) -> list[ScoredGroup]:
    """Groups as the controller holds them; lengths vary, so that packing has something to do."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_sequences // GROUP_SIZE):
        prompt = rng.integers(0, 150_000, PROMPT).astype(np.int32)
        episodes = []
        for size in rng.permuted(np.linspace(0.5, 1.5, GROUP_SIZE)) * (num_tokens - PROMPT):
            turn = Turn(
                prompt_ids=prompt,
                output_ids=rng.integers(0, 150_000, int(size)).astype(np.int32),
                logprobs=rng.random(int(size), dtype=np.float32),
                versions=np.zeros(int(size), dtype=np.int32),
                finish_reason="stop",
                sampling=SamplingParams(),
                text="",
            )
            episodes.append(Episode(task_id=str(number), turns=(turn,)))
        group = Group(number=number, task=Task(id=str(number), prompt=""), episodes=tuple(episodes))
        groups.append(ScoredGroup(group=group, scores=tuple(Score(value=1.0) for _ in episodes)))
    return groups


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stopwatch() -> Callable[[], str]:
    """Started now; says what has passed, of the clock and of this process's CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: f"{time.perf_counter() - wall:.2f} s ({time.process_time() - cpu:.2f} s of CPU)"


async def serve(address: str) -> None:
    """The stand-in trainer: takes plans and tells its memory."""

    async def step(plan: StepPlan) -> StepResult:
        tokens = sum(len(one.sample.token_ids) for batch in plan.micro_batches for one in batch)
        facts = {"tokens": Sum(value=float(tokens)), "peak_mb": Sum(value=peak_mb())}
        return StepResult(step=plan.step, metrics=dict(facts), seconds={})

    channel = await connect(address, "trainer", "t")
    serve_trainer(implement(Trainer, lambda name: step), channel)
    await channel.run()


async def measure(num_sequences: int, num_tokens: int) -> None:
    groups = make_groups(num_sequences, num_tokens)
    print(f"groups made: peak {peak_mb():.0f} MB")
    passed = stopwatch()
    (plan,) = plan_step(1, groups, micro_batch_tokens=4 * num_tokens, shared_prompts=True)
    rows = len(plan.micro_batches)
    print(f"planned: {passed()}, {rows} micro-batches, peak {peak_mb():.0f} MB")
    arrival: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        listener = Listener(f"unix:{folder}/socket", "t", lambda name, channel: arrival.set_result(channel))
        await listener.start()
        child = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", listener.address)
        channel = await arrival
        reading = asyncio.create_task(channel.run())
        passed = stopwatch()
        values = (await remote_trainer(channel).step(plan)).values()
        print(f"sent: {passed()}, {values['tokens'] / 1e6:.1f} million tokens")
        print(
            f"peak of the controller {peak_mb():.0f} MB, of the trainer's process {values['peak_mb']:.0f} MB"
        )
        await channel.close()
        await asyncio.gather(reading, child.wait())
        await listener.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence, on average")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve(options.serve) if options.serve else measure(options.sequences, options.tokens))
