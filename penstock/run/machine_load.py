"""How busy the machine is: processors, memory and GPUs, as counters of the process `machine`. Read from `/proc` and
`nvidia-smi`, every few seconds; where neither is there, nothing is told."""

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
    """The share of processor time that was used since the last look."""

    def __init__(self, read: Callable[[], str] = lambda: Path("/proc/stat").read_text()) -> None:
        self._read = read
        self._before: tuple[int, int] | None = None

    def share(self) -> float | None:
        """None at the first look, and where the system does not tell."""
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
    """Of `/proc/meminfo`: what is used and what there is."""
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in text.splitlines())
    }
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return {}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    return {"memory_used_bytes": float(total - free), "memory_bytes": float(total)}


def read_memory() -> dict[str, float]:
    """Nothing where the system does not tell."""
    with contextlib.suppress(OSError):
        return memory_bytes(Path("/proc/meminfo").read_text())
    return {}


def gpu_numbers(text: str) -> dict[str, float]:
    """Of `nvidia-smi`, by the number of the GPU. What it does not know (`[N/A]`) is left out."""
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
    """Nothing when there are none, or when the tool does not answer soon."""
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
    """Tells the load of the machine for as long as the block lasts."""
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
