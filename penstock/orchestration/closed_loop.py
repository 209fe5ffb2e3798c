"""The closed loop on staleness: after each step, what was measured moves the bound of the next admissions."""

from penstock.buffer.adaptive import AdaptiveBound, AdaptiveRules
from penstock.buffer.config import StalenessConfig
from penstock.buffer.rollout_buffer import RolloutBuffer
from penstock.orchestration.step_planner import TrainedStep


def starting_bound(config: StalenessConfig) -> int:
    """`max_staleness`, brought within what `adaptive` may set."""
    if not config.adaptive:
        return config.max_staleness
    return min(max(config.max_staleness, config.adaptive_min), config.adaptive_max)


class ClosedLoop:
    """Feeds `AdaptiveBound` with each step's effective sample size and the trainer's idle share."""

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

    def observe(self, step: TrainedStep) -> int:
        """Count one step and return the bound that is now in force."""
        if self._state is None:
            return self._buffer.gate.max_staleness
        ess = step.metrics().get("ess", 1.0)
        idle = step.waited_s / max(1e-9, step.waited_s + step.took_s)
        self._state = self._state.observe(ess=ess, idle=idle)
        if self._state.bound != self._buffer.gate.max_staleness:
            self._buffer.set_bound(self._state.bound)
        return self._state.bound
