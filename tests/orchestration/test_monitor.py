import asyncio
from types import SimpleNamespace

import numpy as np

from penstock.observe.config import ObserveConfig
from penstock.orchestration.monitor import RunMonitor
from penstock.orchestration.stepping import TrainedStep
from penstock.types import StepResult, UpdateReceipt


class Writer:
    def __init__(self):
        self.rows = []

    def write(self, step, row):
        self.rows.append((step, row))


def trained(number):
    scored = SimpleNamespace(values=np.array([0.0, 1.0]), scores=(None, None))
    result = StepResult(step=number, metrics={"loss": 2.0}, seconds={"forward": 0.25})
    return TrainedStep(
        number=number,
        selection=SimpleNamespace(groups=(SimpleNamespace(scored=scored),)),
        results=(result,),
        waited_s=0.0,
        took_s=1.0,
        time_s=0.0,
    )


def test_a_step_is_written_with_what_the_last_update_cost():
    writer = Writer()

    async def main():
        monitor = RunMonitor(name="a run", steps=2, config=ObserveConfig(), view=None, writers=[writer])
        monitor.on_step(trained(1), bound=4)
        monitor.on_update(UpdateReceipt(policy="default", version=1, stall_s=0.5, verify_s=0.125))
        monitor.on_step(trained(2), bound=4)

    asyncio.run(main())
    (_, before), (step, after) = writer.rows
    assert "sync_stall_s" not in before
    assert (step, after["sync_stall_s"], after["sync_verify_s"]) == (2, 0.5, 0.125)
    assert (after["reward"], after["loss"], after["forward_s"], after["samples"]) == (0.5, 2.0, 0.25, 4.0)
