"""How many threads each process gets, chosen on purpose: too many threads on few cores slow everything."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    engine: int
    trainer: int


def place_threads(
    *, cores: int, num_engines: int, max_staleness: int, engine: int = 0, trainer: int = 0
) -> Threads:
    """Threads per engine process and for the trainer; 0 means: choose.

    Synchronous training runs one phase at a time, so each may use every core. Otherwise both run at once:
    the trainer gets half of the cores and the engines share the other half."""
    if max_staleness == 0:
        chosen = Threads(engine=max(1, cores // num_engines), trainer=max(1, cores))
    else:
        for_trainer = max(1, cores // 2)
        chosen = Threads(engine=max(1, (cores - for_trainer) // num_engines), trainer=for_trainer)
    return Threads(engine=engine or chosen.engine, trainer=trainer or chosen.trainer)
