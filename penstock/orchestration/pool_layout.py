"""How many GPUs each engine and each rank takes, and what is wrong with those that a pool names."""

from collections.abc import Sequence

from penstock.engines.config import EngineConfig
from penstock.engines.kinds import kind_of, settings_of
from penstock.errors import UserError
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.gpus import Gpu

TAKEN_SHARE = 0.1
"""Of a GPU's memory: when others hold more of it, it is taken."""


def num_ranks(config: PenstockConfig) -> int:
    return config.trainer.parallel.num_ranks


def num_shards(config: PenstockConfig) -> int:
    """Parts that the ranks split weights, gradients and optimizer states into."""
    parallel = config.trainer.parallel
    return parallel.shard * parallel.context * parallel.tensor


def usable_gpus(config: PenstockConfig, gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """GPUs that nobody holds and that are like the first of these; not the one that scores."""
    kind, _, number = config.reward.device.partition(":")
    scoring = int(number or 0) if kind == "cuda" else None
    free = [index for index, gpu in enumerate(gpus) if index != scoring and not _is_taken(gpu)]
    return tuple(index for index in free if _kind(gpus[index]) == _kind(gpus[free[0]]))


def check_pool(side: str, pool: Sequence[int], gpus: Sequence[Gpu]) -> None:
    for number in pool:
        gpu = gpus[number]
        if _is_taken(gpu):
            held = gpu.total_bytes - gpu.free_bytes
            raise UserError(
                f"placement.{side} names GPU {number}, of whose {gb(gpu.total_bytes)} others hold {gb(held)}; name "
                "another one, or end what runs there"
            )
        if _kind(gpu) != _kind(gpus[pool[0]]):
            raise UserError(
                f"placement.{side} must name equal GPUs, got {_describe(gpus, pool[0])} and "
                f"{_describe(gpus, number)}; the slowest would hold up the others"
            )


def check_ranks(config: PenstockConfig, trainer: Sequence[int]) -> None:
    ranks = num_ranks(config)
    if ranks not in (1, len(trainer)):
        raise UserError(
            f"placement.trainer names {counted(len(trainer), 'GPU')}, and trainer.parallel has {ranks} ranks; name "
            "one GPU for each"
        )


def group_engines(section: EngineConfig, pool: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """GPUs of the pool, one engine after the other; as many engines as the pool holds, unless they are counted."""
    sizes = engine_sizes(section)
    unit, others = sizes[0], sizes[section.num_first :]
    if is_counted(section) or not unit:
        if sum(sizes) != len(pool):
            raise UserError(
                f"placement.engines names {counted(len(pool), 'GPU')}, and {counted(len(sizes), 'engine')} of "
                f"engine.count and engine.beside take {sum(sizes)}; name as many"
            )
        return cut(pool, sizes)
    more = len(pool) - sum(others)
    if more < unit or more % unit:
        beside = f" beside others' {sum(others)}" if others else ""
        raise UserError(
            f"placement.engines names {counted(len(pool), 'GPU')}, and an engine takes {unit}{beside}, which does "
            "not divide them; name another number"
        )
    return cut(pool, (*[unit] * (more // unit), *others))


def num_taken(section: EngineConfig, available: int) -> int:
    """GPUs that engines take where so many are there; at least one engine has its own."""
    sizes = engine_sizes(section)
    unit, beside = sizes[0], sum(sizes[section.num_first :])
    if is_counted(section) or not unit:
        return sum(sizes)
    return beside + unit * max(1, (available - beside) // unit)


def cut(pool: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The pool in groups of these sizes."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return tuple(tuple(pool[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def engine_sizes(section: EngineConfig) -> tuple[int, ...]:
    """GPUs that each engine takes; 0 where it joins a server, or runs on a CPU."""
    return tuple(_size(member) for member in section.members)


def _size(member: EngineConfig) -> int:
    settings = settings_of(member)
    if getattr(settings, "urls", ()) or member.device == "cpu":
        return 0
    return kind_of(member.kind).num_gpus(settings)


def is_counted(section: EngineConfig) -> bool:
    """Whether the config says how many engines there are."""
    return "count" in section.model_fields_set


def _is_taken(gpu: Gpu) -> bool:
    return gpu.total_bytes - gpu.free_bytes > TAKEN_SHARE * gpu.total_bytes


def _kind(gpu: Gpu) -> tuple[str, int]:
    return gpu.name, gpu.total_bytes


def _describe(gpus: Sequence[Gpu], number: int) -> str:
    return f"GPU {number} ({gpus[number].name}, {gb(gpus[number].total_bytes)})"


def numbers(pool: Sequence[int]) -> str:
    return ", ".join(map(str, pool))


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
