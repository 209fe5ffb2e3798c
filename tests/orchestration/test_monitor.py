import asyncio

from penstock.observe.config import ObserveConfig
from penstock.orchestration.monitor import RunMonitor
from penstock.types import UpdateReceipt


class Writer:
    def __init__(self):
        self.rows = []

    def write(self, step, row):
        self.rows.append((step, row))


def test_every_version_but_the_first_is_written_with_what_it_cost():
    writer = Writer()

    async def main():
        monitor = RunMonitor(name="a run", steps=2, config=ObserveConfig(), view=None, writers=[writer])
        for version in (0, 1):
            monitor.on_update(UpdateReceipt(policy="default", version=version, stall_s=0.5, verify_s=0.25))

    asyncio.run(main())
    assert writer.rows == [(1, {"sync_stall_s": 0.5, "sync_verify_s": 0.25})]
