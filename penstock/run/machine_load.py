"""Reports how busy the machine is: CPU, memory and GPUs, as counters of the process `machine`.

Every few seconds they are read from `/proc` and `nvidia-smi`; where neither exists, nothing is reported.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from penstock.observe.event_stream import EventStream

EVERY_S = 5.0
MACHINE = "machine"
QUERY = (
    "nvidia-smi",
    "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw",
    "--format=csv,noheader,nounits",
)
GPU_TIMEOUT_S = 4.0


class Processors:
    """Measures the share of CPU time that was used since the last call."""

    def __init__(self, read: Callable[[], str] = lambda: Path("/proc/stat").read_text()) -> None:
        self._read = read
        self._before: tuple[int, int] | None = None

    def share(self) -> float | None:
        """Return the share; None at the first call, and where the system does not report it."""
        try:
            words = self._read().splitlines()[0].split()
        except (OSError, IndexError):
            return None
        times = [int(word) for word in words[1:9]]
        total, idle = sum(times), times[3] + times[4]
        before, self._before = self._before, (total, idle)
        if before is None or total <= before[0]:
            return None
        return 1 - (idle - before[1]) / (total - before[0])


def memory_bytes(text: str) -> dict[str, float]:
    """Parse `/proc/meminfo` into the used and the total memory; none where it lacks them."""
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in text.splitlines())
    }
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return {}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    return {"memory_used_bytes": float(total - free), "memory_bytes": float(total)}


def read_memory() -> dict[str, float]:
    """Return the memory counters; none where the system does not report them."""
    with contextlib.suppress(OSError):
        return memory_bytes(Path("/proc/meminfo").read_text())
    return {}


def gpu_numbers(text: str) -> dict[str, float]:
    """Parse the output of `nvidia-smi` into counters by GPU number. Unknown values (`[N/A]`) are left out."""
    names = (
        ("gpu{}_busy", 0.01),
        ("gpu{}_memory_used_bytes", 2.0**20),
        ("gpu{}_memory_bytes", 2.0**20),
        ("gpu{}_watts", 1.0),
    )
    found: dict[str, float] = {}
    for line in text.splitlines():
        index, *values = (word.strip() for word in line.split(","))
        for (name, unit), value in zip(names, values, strict=False):
            with contextlib.suppress(ValueError):
                found[name.format(index)] = float(value) * unit
    return found


async def read_gpus() -> dict[str, float]:
    """Return the GPU counters; none without GPUs, or when the tool does not answer soon."""
    process = await asyncio.create_subprocess_exec(
        *QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), GPU_TIMEOUT_S)
    except TimeoutError:
        return {}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return gpu_numbers(output.decode(errors="replace"))


@contextlib.asynccontextmanager
async def machine_load(stream: EventStream, *, has_gpus: bool) -> AsyncIterator[None]:
    """Report the load of the machine for as long as the block lasts."""
    ask_gpus = has_gpus and shutil.which(QUERY[0]) is not None

    async def watch() -> None:
        processors = Processors()
        while True:
            values: dict[str, float] = {}
            share = processors.share()
            if share is not None:
                values["cpu_busy"] = share
            values |= read_memory()
            if ask_gpus:
                with contextlib.suppress(OSError):
                    values |= await read_gpus()
            if values:
                stream.of(MACHINE).count(**values)
            await asyncio.sleep(EVERY_S)

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
