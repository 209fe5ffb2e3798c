"""Adapts `max_staleness` within its limits to what each step measured.

A pure state machine. Too small an effective sample size (ESS) tightens the bound by one; a trainer that idles
while the ESS is healthy relaxes it by one. Three things keep it from oscillating:

- a dead time after every move: the steps already in flight were admitted under the old bound, so as many
  observations as the larger of both bounds, plus one, say nothing about the new one and are not counted;
- decisions on the mean of a window of counted observations, with a margin between the two thresholds;
- memory: a bound that cost too much ESS is not tried again until the ESS below it has risen by more
  than the margin since the bound was left.
"""

from dataclasses import dataclass, replace

from penstock.loop.config import StalenessConfig
from penstock.loop.rollout_buffer import RolloutBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRules:
    """Holds the limits of the bound, and the thresholds at which it moves by one."""

    min_staleness: int = 1
    """The tightest bound it may set."""
    max_staleness: int = 16
    """The loosest bound it may set."""
    ess_floor: float = 0.5
    """Tighten when the effective sample size, averaged over the window, is below this."""
    ess_margin: float = 0.1
    """Relax only when it is at least this much above the floor."""
    idle_limit: float = 0.1
    """Relax when the trainer idled for more than this share of the window's time."""
    window: int = 4
    """Counted observations per decision."""

    def __post_init__(self) -> None:
        rules = (
            ("min_staleness", 0 <= self.min_staleness <= self.max_staleness, "between 0 and max_staleness"),
            ("ess_floor", 0 < self.ess_floor < 1, "between 0 and 1"),
            ("ess_margin", self.ess_margin >= 0, ">= 0"),
            ("idle_limit", 0 <= self.idle_limit < 1, "in [0, 1)"),
            ("window", self.window >= 1, ">= 1"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Remembers a bound that cost too much ESS, and the first ESS measured at the bound one below."""

    bound: int
    ess_below: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBound:
    """Holds the bound and the observations of the current window. `observe` returns the next state."""

    rules: AdaptiveRules
    bound: int
    dead: int = 0
    """Observations still to be ignored."""
    ess: tuple[float, ...] = ()
    idle: tuple[float, ...] = ()
    ceiling: Ceiling | None = None

    @classmethod
    def start(cls, rules: AdaptiveRules, bound: int) -> "AdaptiveBound":
        """Begin at `bound`, clipped to the range of the rules."""
        within = min(max(bound, rules.min_staleness), rules.max_staleness)
        return cls(rules=rules, bound=within, dead=within + 1)

    def observe(self, *, ess: float, idle: float) -> "AdaptiveBound":
        """Count one step, given its effective sample size and the share of its time in which the trainer idled."""
        if self.dead > 0:
            return replace(self, dead=self.dead - 1)
        state = replace(self, ess=(*self.ess, ess), idle=(*self.idle, idle))
        return state if len(state.ess) < self.rules.window else state._decide()

    def _decide(self) -> "AdaptiveBound":
        ess, idle = _mean(self.ess), _mean(self.idle)
        state = replace(self, ess=(), idle=(), ceiling=self._remember(ess))
        if ess < self.rules.ess_floor:
            if self.bound == self.rules.min_staleness:
                return state
            return state._move(-1, Ceiling(bound=self.bound))
        healthy = ess >= self.rules.ess_floor + self.rules.ess_margin
        if idle > self.rules.idle_limit and healthy and state._may_rise(ess):
            return state._move(+1, None if state._lifts(ess) else state.ceiling)
        return state

    def _remember(self, ess: float) -> Ceiling | None:
        """Note the first ESS that is measured one below the ceiling."""
        ceiling = self.ceiling
        if ceiling is None or ceiling.ess_below is not None or self.bound != ceiling.bound - 1:
            return ceiling
        return replace(ceiling, ess_below=ess)

    def _may_rise(self, ess: float) -> bool:
        if self.bound >= self.rules.max_staleness:
            return False
        return self.ceiling is None or self.bound + 1 < self.ceiling.bound or self._lifts(ess)

    def _lifts(self, ess: float) -> bool:
        """Return whether the ESS has risen enough to try the bound that failed."""
        ceiling = self.ceiling
        if ceiling is None or self.bound + 1 != ceiling.bound or ceiling.ess_below is None:
            return False
        return ess > ceiling.ess_below + self.rules.ess_margin

    def _move(self, by: int, ceiling: Ceiling | None) -> "AdaptiveBound":
        bound = self.bound + by
        return replace(self, bound=bound, dead=max(bound, self.bound) + 1, ceiling=ceiling)


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def starting_bound(config: StalenessConfig) -> int:
    """Return `max_staleness`, clipped to the range of `adaptive` if that is on."""
    if not config.adaptive:
        return config.max_staleness
    return min(max(config.max_staleness, config.adaptive_min), config.adaptive_max)


class ClosedLoop:
    """Moves the buffer's bound as `AdaptiveBound` says; a run that is not adaptive keeps its bound."""

    def __init__(self, buffer: RolloutBuffer, state: AdaptiveBound | None) -> None:
        self._buffer = buffer
        self._state = state

    @classmethod
    def of(cls, config: StalenessConfig, buffer: RolloutBuffer) -> "ClosedLoop":
        if not config.adaptive:
            return cls(buffer, None)
        rules = AdaptiveRules(
            min_staleness=config.adaptive_min,
            max_staleness=config.adaptive_max,
            ess_floor=config.ess_floor,
            idle_limit=config.idle_limit,
        )
        return cls(buffer, AdaptiveBound.start(rules, buffer.gate.max_staleness))

    def observe(self, *, ess: float, idle: float) -> int:
        """Count one step and return the bound that is now in force."""
        if self._state is None:
            return self._buffer.gate.max_staleness
        self._state = self._state.observe(ess=ess, idle=idle)
        if self._state.bound != self._buffer.gate.max_staleness:
            self._buffer.set_bound(self._state.bound)
        return self._state.bound
