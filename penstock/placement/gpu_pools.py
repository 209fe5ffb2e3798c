"""Decides which GPU of this machine each worker gets: a pool for the trainer, one rank a GPU, and one for engines.

    placement: {trainer: [0, 1], engines: [2, 3, 4]}     as they are named
    nothing                                              the trainer gets as few as hold it, engines the rest

With a small model, one GPU, or settings that name a device, trainer and engines share a GPU and there are no pools.
The resulting config names all GPUs, so a resumed run gets the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.root import PenstockConfig
from penstock.config.unresolved import AUTO
from penstock.engines.config import EngineConfig
from penstock.engines.kinds import kind_of, settings_of
from penstock.errors import UserError
from penstock.placement.gpus import Gpu

SPLIT_FROM = 100_000_000
"""Parameters from which engines get GPUs of their own by default: smaller models would leave them idle."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
TAKEN_SHARE = 0.1
"""A GPU is taken when other processes hold more than this share of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Holds the GPU numbers of trainer and engines, as this process sees them."""

    trainer: tuple[int, ...]
    """One GPU for each rank."""
    engines: tuple[tuple[int, ...], ...]
    """The GPUs of each engine; none where it joins a server."""
    why: str = ""
    idle: tuple[int, ...] = ()

    def __str__(self) -> str:
        groups = [group for group in self.engines if group]
        words = [f"trainer on {numbers(self.trainer)}"]
        if len(self.trainer) > 1:
            words[0] += f" ({len(self.trainer)} ranks)"
        if groups and all(len(group) == 1 for group in groups):
            own = sorted({number for group in groups for number in group})
            words.append(f"{counted(len(groups), 'engine')} on {numbers(own)}")
        elif groups:
            words.append("engines on " + " and ".join(numbers(group) for group in groups))
        if self.idle:
            words.append(f"{numbers(self.idle)} idle")
        return f"GPUs: {', '.join(words)}" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Holds the model's memory needs, in bytes of one GPU."""

    num_parameters: int
    rank: Callable[[int], int]
    """What each rank needs, by the number of ranks that split the trainer."""
    room: Callable[[Gpu], int]
    """How much of a GPU can be used."""


def resolve_pools(
    config: PenstockConfig, gpus: Sequence[Gpu], needs: Needs | None
) -> tuple[PenstockConfig, Pools | None]:
    """Return the config with every GPU named, and the pools; the same config and None where there are no pools.

    `needs` is None where no worker of the run is on a GPU.
    """
    placement = config.placement
    if placement.trainer or placement.engines:
        pools = _named(config, gpus)
    elif needs is not None:
        found = _chosen(config, gpus, needs)
        if found is None:
            return config, None
        pools = found
    else:
        return config, None
    return _with(config, pools), pools


def visible_gpus(pool: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that limits a worker to these GPUs, as its `cuda:0` and so on; nothing
    without a pool."""
    if not pool:
        return {}
    visible = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    return {VISIBLE: ",".join(visible[number] if visible else str(number) for number in pool)}


def engine_pools(config: PenstockConfig) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each engine, from a config that names them; () for each where it does not."""
    named, sizes = config.placement.engines, engine_sizes(config.engine)
    if not named or named == config.placement.trainer:  # all of them on one GPU
        return tuple(named if size else () for size in sizes)
    return cut(named, sizes)


def engines_alone(config: PenstockConfig, gpus: Sequence[Gpu]) -> PenstockConfig:
    """Return a run's config for its engines alone, on the GPUs that it names.

    Where this machine lacks some of these GPUs, one engine runs on `engine.device`.
    """
    named = config.placement.engines
    if not named or max(named) < len(gpus):
        return config
    placement = config.placement.model_copy(update={"trainer": (), "engines": ()})
    engine = config.engine.model_copy(update={"count": 1})
    return config.model_copy(update={"placement": placement, "engine": engine})


def used_gpus(config: PenstockConfig) -> frozenset[int]:
    """Return all GPUs that a config names."""
    return frozenset((*config.placement.trainer, *config.placement.engines))


def _named(config: PenstockConfig, gpus: Sequence[Gpu]) -> Pools:
    """Return the pools where the config names one or both. A side that is not named gets what it takes of the
    remaining usable GPUs: the trainer one per rank, engines as many as fit."""
    placement, sizes = config.placement, engine_sizes(config.engine)
    _check_named(config, gpus)
    named = {*placement.trainer, *placement.engines}
    rest = tuple(number for number in usable_gpus(config, gpus) if number not in named)
    trainer = placement.trainer or rest[: num_ranks(config)]
    engines = placement.engines or rest[: num_taken(config.engine, len(rest))]
    if not trainer or (not engines and any(sizes)):
        side, other = ("engines", "trainer") if trainer else ("trainer", "engines")
        raise UserError(f"placement.{other} leaves no GPU for the {side}; name fewer")
    check_pool("trainer", trainer, gpus)
    check_pool("engines", engines, gpus)
    if trainer == engines and len(trainer) == 1 and max(sizes) == 1:
        return Pools(trainer=trainer, engines=tuple(trainer if size else () for size in sizes))
    if both := set(trainer) & set(engines):
        raise UserError(
            f"placement.trainer and placement.engines both name GPU {min(both)}; name different ones, or one and "
            "the same GPU for both"
        )
    check_ranks(config, trainer)
    return Pools(trainer=trainer, engines=group_engines(config.engine, engines))


def _check_named(config: PenstockConfig, gpus: Sequence[Gpu]) -> None:
    if not config.launcher.is_local:
        raise UserError(
            f"placement.trainer and placement.engines need launcher=local, got {config.launcher.kind}, which finds "
            "the GPUs itself; name launcher.resources"
        )
    engines_on_cpu = config.engine.device == "cpu" and not config.placement.engines
    for setting, device in (("model.device", config.model.device), ("engine.device", config.engine.device)):
        if device not in (AUTO, "cuda") and not (engines_on_cpu and setting == "engine.device"):
            raise UserError(f"{setting} must be auto where placement names GPUs, got {device}; leave it out")
    for side, named in (("trainer", config.placement.trainer), ("engines", config.placement.engines)):
        for number in named:
            if number >= len(gpus):
                raise UserError(
                    f"placement.{side} names GPU {number}, and {counted(len(gpus), 'GPU')} can be seen here; name "
                    "those that nvidia-smi lists"
                )


def _chosen(config: PenstockConfig, gpus: Sequence[Gpu], needs: Needs) -> Pools | None:
    """Give the trainer as few GPUs as hold it and engines the others. None where both share one."""
    sizes, ranks = engine_sizes(config.engine), num_ranks(config)
    devices = {config.model.device, config.engine.device}
    is_elsewhere = not config.launcher.is_local or config.model.device == "cpu"
    if is_elsewhere or (ranks == 1 and _shares(devices, sizes, needs)):
        return None
    for setting, device in (("model.device", config.model.device), ("engine.device", config.engine.device)):
        if device not in (AUTO, "cuda", "cpu"):
            raise UserError(
                f"{setting} must be auto where trainer.parallel has {ranks} ranks, got {device}; name GPUs in "
                "placement.trainer and placement.engines"
            )
    usable, least = usable_gpus(config, gpus), num_taken(config.engine, 0)
    if len(usable) < ranks + least:
        if ranks == 1:
            return None
        raise UserError(
            f"trainer.parallel has {ranks} ranks and engines take {counted(least, 'GPU')}, and "
            f"{len(usable)} of {counted(len(gpus), 'GPU')} are free here; lower trainer.parallel"
        )
    needed, why = _ranks_needed(config, gpus[usable[0]], len(usable) - least, needs)
    trainer, rest = usable[:needed], usable[needed:]
    engines = rest[: num_taken(config.engine, len(rest))]
    return Pools(
        trainer=trainer,
        engines=group_engines(config.engine, engines),
        why=f"{why}; generation gets the rest (placement.trainer and placement.engines name others)",
        idle=tuple(number for number in range(len(gpus)) if number not in (*trainer, *engines)),
    )


def _shares(devices: set[str], sizes: Sequence[int], needs: Needs) -> bool:
    """Return whether there are no pools: the config names devices, engines take no GPU, or the model is small."""
    return bool(devices - {AUTO, "cuda"}) or not any(sizes) or needs.num_parameters < SPLIT_FROM


def _ranks_needed(config: PenstockConfig, gpu: Gpu, most: int, needs: Needs) -> tuple[int, str]:
    """Return how many GPUs the trainer gets, and why."""
    ranks, room = num_ranks(config), needs.room(gpu)
    if ranks > 1:
        return ranks, f"trainer.parallel has {ranks} ranks"
    fits = [number for number in range(1, most + 1) if needs.rank(number) <= room]
    why = f"the trainer needs about {gb(needs.rank(1))}, and {gb(room)} of a GPU can be used"
    return (fits[0] if fits else most), why


def _with(config: PenstockConfig, pools: Pools) -> PenstockConfig:
    shared = pools.trainer == next((group for group in pools.engines if group), ())
    members = pools.trainer if shared else tuple(number for group in pools.engines for number in group)
    placement = config.placement.model_copy(update={"trainer": pools.trainer, "engines": members})
    engine = config.engine
    if not shared:
        count = len(pools.engines) - sum(engine.beside.values())
        engine = engine.model_copy(update={"count": count} if not is_counted(engine) else {})
    trainer = config.trainer
    if len(pools.trainer) > num_ranks(config):
        parallel = trainer.parallel.model_copy(update={"shard": len(pools.trainer)})
        trainer = trainer.model_copy(update={"parallel": parallel})
    return config.model_copy(update={"placement": placement, "engine": engine, "trainer": trainer})


def num_ranks(config: PenstockConfig) -> int:
    return config.trainer.parallel.num_ranks


def num_shards(config: PenstockConfig) -> int:
    """Return into how many parts the ranks split weights, gradients and optimizer states."""
    parallel = config.trainer.parallel
    return parallel.shard * parallel.context * parallel.tensor


def usable_gpus(config: PenstockConfig, gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """Return the GPUs that are free and equal to the first free one, without the GPU that scores."""
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
    """Split the pool into the GPUs of each engine. Unless the engines are counted, there are as many as the pool
    holds."""
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
    """Return how many GPUs the engines take: as `engine.count` says, else as many whole engines as fit, at least
    one."""
    sizes = engine_sizes(section)
    unit, beside = sizes[0], sum(sizes[section.num_first :])
    if is_counted(section) or not unit:
        return sum(sizes)
    return beside + unit * max(1, (available - beside) // unit)


def cut(pool: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return tuple(tuple(pool[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def engine_sizes(section: EngineConfig) -> tuple[int, ...]:
    """Return how many GPUs each engine takes; 0 where it joins a server or runs on a CPU."""
    return tuple(_size(member) for member in section.members)


def _size(member: EngineConfig) -> int:
    settings = settings_of(member)
    if getattr(settings, "urls", ()) or member.device == "cpu":
        return 0
    return kind_of(member.kind).num_gpus(settings)


def is_counted(section: EngineConfig) -> bool:
    """Return whether the config says how many engines there are."""
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
