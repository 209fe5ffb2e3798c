"""Why no controller splits the GPU: the staleness gate does.

Alone, the engine needs G seconds for a step's worth of groups and the trainer T for a step. While both work
they run at shares g and t of that. Whoever is ahead is stopped by the gate (the engine) or by an empty buffer
(the trainer), and the other then has the GPU to itself. So a step takes G + T less what overlaps: with
g + t ≥ 1, never longer than taking turns, and each side gets at least the share that turns would give it.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.config.root import PenstockConfig
from penstock.planner.simulation import (
    SimulatedEngine,
    SimulatedTrainer,
)
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Chunk, GenerateRequest, StepPlan, StepResult
from penstock.run.assembly import build_controller
from tests.loop.simulated_parts import Tasks, simulated_parts

GROUPS, GROUP_SIZE, TOKENS, STEPS = 4, 2, 4, 40
PIECES = 16
"""Of a step, between which the trainer notices that the engine came or went."""


class SharedGpu:
    """Runs a side at full speed while the other rests, else at that side's share."""

    def __init__(self, shares: dict[str, float]) -> None:
        self._shares = shares
        self.users = dict.fromkeys(shares, 0)
        self.done_s = dict.fromkeys(shares, 0.0)

    async def work(self, side: str, seconds: float) -> None:
        contended = all(self.users.values())
        await asyncio.sleep(seconds / (self._shares[side] if contended else 1.0))
        self.done_s[side] += seconds


class GpuEngine(SimulatedEngine):
    """One token at a time: what it makes a second does not depend on how many ask."""

    def __init__(self, gpu: SharedGpu, token_s: float) -> None:
        super().__init__(num_tokens=lambda: TOKENS, token_s=lambda: 0.0, update_s=lambda: 0.0)
        self._gpu, self._alone_s = gpu, token_s
        self._turn = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._gpu.users["engine"] += 1
        try:
            async for chunk in super().generate(request):
                async with self._turn:
                    await self._gpu.work("engine", self._alone_s)
                yield chunk
        finally:
            self._gpu.users["engine"] -= 1


class GpuTrainer(SimulatedTrainer):
    def __init__(self, gpu: SharedGpu, step_s: float) -> None:
        super().__init__(step_s=lambda: 0.0, publish_s=lambda: 0.0)
        self._gpu, self._alone_s = gpu, step_s

    async def step(self, plan: StepPlan) -> StepResult:
        self._gpu.users["trainer"] += 1
        for _ in range(PIECES):
            await self._gpu.work("trainer", self._alone_s / PIECES)
        self._gpu.users["trainer"] -= 1
        return await super().step(plan)


def shares_of(generation_s: float, training_s: float, shares: dict[str, float]) -> dict[str, float]:
    """What each side did of what it does alone, over a run."""
    gpu = SharedGpu(shares)

    async def run() -> float:
        engine = GpuEngine(gpu, generation_s / (GROUPS * GROUP_SIZE * TOKENS))
        config = PenstockConfig.model_validate(
            {
                "rollout": {"group_size": GROUP_SIZE, "groups_per_step": GROUPS, "max_new_tokens": 64},
                "staleness": {"max_staleness": 2},
                "trainer": {"micro_batch_tokens": 64},
                "run": {"steps": STEPS},
            }
        )
        tasks = Tasks()
        parts = simulated_parts(engine, GpuTrainer(gpu, training_s), score_s=0.0, tasks=tasks)
        controller = build_controller(config, parts)
        await controller.start()
        began = asyncio.get_running_loop().time()
        await controller.run()
        assert tasks.returned == []
        return asyncio.get_running_loop().time() - began

    took_s = run_in_virtual_time(run())
    return {side: done_s / took_s for side, done_s in gpu.done_s.items()}


@pytest.mark.parametrize("generation_s", [0.125, 0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize(
    ("engine", "trainer"),
    [
        (0.49, 0.57),
        (0.38, 0.90),
        (0.52, 0.78),
    ],  # as measured: time slices, MPS, MPS with a trainer that yields
)
def test_each_side_gets_at_least_what_taking_turns_would_give_it(
    generation_s: float, engine: float, trainer: float
) -> None:
    found = shares_of(generation_s, 1.0, {"engine": engine, "trainer": trainer})
    in_turns = generation_s / (generation_s + 1.0)
    slack = 0.95  # the first step's groups are made before there is anything to train on
    assert found["engine"] >= slack * in_turns
    assert found["trainer"] >= slack * (1 - in_turns)


@pytest.mark.parametrize("generation_s", [0.5, 1.0, 2.0])
def test_what_sharing_gains_is_what_overlaps(generation_s: float) -> None:
    """The side that needs less of the shared time sets the overlap; outside it the other runs at full speed."""
    g, t = 0.29, 0.92
    found = shares_of(generation_s, 1.0, {"engine": g, "trainer": t})
    overlap = min(generation_s / g, 1.0 / t)
    cycle_s = generation_s + 1.0 - (g + t - 1) * overlap
    assert found["engine"] + found["trainer"] == pytest.approx((generation_s + 1.0) / cycle_s, rel=0.05)
