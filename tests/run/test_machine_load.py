import asyncio

import pytest

from penstock.observe.event_stream import EventStream
from penstock.observe.events import Counters
from penstock.observe.readers import MemoryReader
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.run.machine_load import Processors, gpu_numbers, machine_load, memory_bytes


def test_processors_are_busy_when_they_do_not_idle() -> None:
    texts = iter(["cpu  10 0 10 80 0 0 0 0 0 0", "cpu  40 0 20 130 10 0 0 0 0 0", "", "cpu  1 0 1 1 0 0 0 0"])
    processors = Processors(lambda: next(texts))
    assert processors.share() is None
    assert processors.share() == pytest.approx(0.4)
    assert processors.share() is None


def test_memory_that_is_not_available_is_used() -> None:
    text = "MemTotal:       100 kB\nMemFree:  5 kB\nMemAvailable:    25 kB\n"
    assert memory_bytes(text) == {"memory_used_bytes": 75 * 1024.0, "memory_bytes": 100 * 1024.0}
    assert memory_bytes("MemTotal: 100 kB") == {}


def test_what_a_gpu_does_not_know_is_left_out() -> None:
    found = gpu_numbers("0, 87, 1024, 2048, 310.5\n1, [N/A], 1, 2, [N/A]\n")
    assert found == {
        "gpu0_busy": 0.87,
        "gpu0_memory_used_bytes": 2.0**30,
        "gpu0_memory_bytes": 2.0**31,
        "gpu0_watts": 310.5,
        "gpu1_memory_used_bytes": 2.0**20,
        "gpu1_memory_bytes": 2.0**21,
    }
    assert gpu_numbers("") == {}


def test_the_load_is_told_every_few_seconds() -> None:
    memory = MemoryReader()

    async def main() -> None:
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("memory", memory)
        async with machine_load(stream, has_gpus=False):
            await asyncio.sleep(11)

    run_in_virtual_time(main())
    told = [event for event in memory.events if isinstance(event, Counters)]
    assert [event.process for event in told] == ["machine"] * 3
    assert [event.time for event in told] == [0.0, 5.0, 10.0]
    assert 0 < told[0].values["memory_used_bytes"] < told[0].values["memory_bytes"]
