import asyncio
from types import SimpleNamespace

import numpy as np

from penstock.observe.config import ObserveConfig
from penstock.orchestration.monitor import RunMonitor
from penstock.orchestration.step_planner import TrainedStep
from penstock.types import StepResult, UpdateReceipt
from penstock.types.metrics import Sum


class Writer:
    def __init__(self):
        self.rows = []

    def write(self, step, row):
        self.rows.append((step, row))


def update(monitor, version, stall_s):
    monitor.on_update(UpdateReceipt(policy="default", version=version, stall_s=stall_s, verify_s=0.0))


def trained(number):
    scored = SimpleNamespace(values=np.array([0.0, 1.0]), scores=(None, None))
    result = StepResult(step=number, metrics={"loss": Sum(value=2.0)}, seconds={"forward": 0.25})
    return TrainedStep(
        number=number,
        taken=SimpleNamespace(groups=(SimpleNamespace(scored=scored),)),
        results=(result,),
        waited_s=0.0,
        took_s=1.0,
        time_s=0.0,
    )


def test_a_step_is_written_with_the_longest_stall_since_the_last():
    writer = Writer()

    async def main():
        monitor = RunMonitor(name="a run", steps=2, config=ObserveConfig(), view=None, writers=[writer])
        update(monitor, 0, 9.0)  # before training
        monitor.on_step(trained(1), bound=4)
        update(monitor, 1, 0.5)
        update(monitor, 2, 0.25)
        monitor.on_step(trained(2), bound=4)
        monitor.on_step(trained(3), bound=4)

    asyncio.run(main())
    assert [(step, row.get("sync_stall_s")) for step, row in writer.rows] == [(1, None), (2, 0.5), (3, None)]
    last = writer.rows[-1][1]
    assert (last["reward"], last["loss"], last["forward_s"], last["samples"]) == (0.5, 2.0, 0.25, 6.0)
