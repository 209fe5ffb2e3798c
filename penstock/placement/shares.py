"""Decides how many threads each process gets, and how processes share a GPU.

Threads are set explicitly, since too many on few cores slow everything. Two processes on one GPU take turns
unless they are clients of MPS. Then both run at once, and `placement.first` says whose kernels go first.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.root import PenstockConfig
from penstock.errors import UserError
from penstock.placement.automatic import sites_of
from penstock.placement.gpu_pools import visible_gpus
from penstock.placement.gpus import Gpu
from penstock.processes.launchers.mps import mps
from penstock.sync.config import SyncConfig

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit: microseconds of CPU time in a period, and the period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    engine: int
    trainer: int


def place_threads(
    *, cores: int, num_engines: int, max_staleness: int, engine: int = 0, trainer: int = 0, num_ranks: int = 1
) -> Threads:
    """Return the threads of each engine process and of each rank of the trainer. Arguments of 0 are chosen here.

    Synchronous training runs one phase at a time, so each may use every core. Otherwise both run at once: the
    trainer gets half of the cores and the engines share the other half.
    """
    if max_staleness == 0:
        chosen = Threads(engine=max(1, cores // num_engines), trainer=max(1, cores // num_ranks))
    else:
        for_trainer = max(1, cores // 2)
        chosen = Threads(
            engine=max(1, (cores - for_trainer) // num_engines), trainer=max(1, for_trainer // num_ranks)
        )
    return Threads(engine=engine or chosen.engine, trainer=trainer or chosen.trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Holds the variables that the workers of each kind get besides those that they inherit."""

    engine: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, str] = field(default_factory=dict)


def scorer_environment(device: str, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that limits a scoring worker to its GPU, as its `cuda:0`; nothing for a
    CPU."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    index = int(number or 0)
    if index >= len(gpus):
        raise UserError(
            f"reward.device is {device}, and {len(gpus)} GPUs can be seen here; use cpu or a lower number"
        )
    return visible_gpus((index,), environ)


def shares_a_gpu(config: PenstockConfig, gpus: Sequence[Gpu]) -> bool:
    sites = sites_of(config, gpus)
    return sites.share_a_gpu and sites.trainer.gpu is not None


@contextmanager
def sharing(
    config: PenstockConfig, gpus: Sequence[Gpu], environ: Mapping[str, str], log: Callable[[str], None]
) -> Iterator[Environments]:
    """Run an MPS daemon for engines and trainer while the block runs, if they share a GPU and `placement.share`
    allows it."""
    placement = config.placement
    shared = shares_a_gpu(config, gpus)
    if placement.share == "mps" and not shared:
        log("placement.share=mps changes nothing: trainer and engines have no GPU in common")
    # In synchronous training one side rests while the other works.
    asynchronous = config.staleness.max_staleness > 0
    wanted = placement.share == "mps" or (placement.share == "auto" and asynchronous)
    if not (shared and wanted):
        yield Environments()
        return
    with mps(environ, log) as daemon:
        if daemon is None:
            yield Environments()
            return
        yield Environments(
            engine=daemon.environment(yields=placement.first == "trainer"),
            trainer=daemon.environment(yields=placement.first == "engine"),
        )


def rank_environment(num_ranks: int, sync: SyncConfig) -> dict[str, str]:
    """Return the variable that names the network interface between ranks: `sync.interface`, else the loopback."""
    return {} if num_ranks == 1 else {"GLOO_SOCKET_IFNAME": sync.interface or "lo"}


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Return the cores that this process may be scheduled on, at most its container's share and at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, _share(cpu_max) or cores))


def _share(cpu_max: Path) -> int | None:
    """Return the container's whole cores, rounded up; None when there is no limit, or none is known."""
    try:
        quota, period = cpu_max.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
