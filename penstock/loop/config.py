"""Defines the `staleness` section: how old a token may be when it is trained on."""

from typing import Literal

from pydantic import Field, model_validator

from penstock.config import Section


class StalenessConfig(Section):
    """Bounds how old a token may be when it is trained on."""

    max_staleness: int = Field(default=4, ge=0, le=1000)
    """The bound, in updates between the weights that sampled a token and the weights that train on it.
    0 is exactly synchronous, on-policy training."""
    late: Literal["mask", "wait", "drop", "correct"] = "correct"
    """What happens to tokens that cross the bound: `correct` trains on them like on all others, with the
    corrections of the `algorithm` section (the bound is then one on admission), `mask` takes them out of the
    loss, `wait` makes the trainer wait for groups that are about to cross, `drop` discards their group and
    gives its task back (biased against long answers)."""
    ahead: int = Field(default=1, ge=1, le=1000)
    """Steps' worth of finished groups that may wait for a trainer that never waits for groups itself. Generating
    further ahead would not make it faster, only its tokens older."""
    max_filtered_in_a_row: int = Field(default=512, ge=1)
    """End the run when selection (`algorithm.selection`) has dropped this many groups in a row: nothing is
    left to learn from."""
    adaptive: bool = False
    """Move the bound by what is measured: tighten it when the effective sample size falls below its floor,
    relax it when the trainer idles."""
    adaptive_min: int = Field(default=1, ge=0, le=1000)
    """The tightest bound that `adaptive` may set."""
    adaptive_max: int = Field(default=16, ge=0, le=1000)
    """The loosest bound that `adaptive` may set."""
    ess_floor: float = Field(default=0.5, gt=0, lt=1)
    """Tighten when the effective sample size, as a share of the samples, is below this."""
    idle_limit: float = Field(default=0.1, ge=0, lt=1)
    """Relax when the trainer waits for more than this share of its time."""

    @property
    def loosest(self) -> int:
        """Return the bound that admission never exceeds."""
        return self.adaptive_max if self.adaptive else self.max_staleness

    @model_validator(mode="after")
    def _bounds_fit(self) -> "StalenessConfig":
        if self.adaptive_min > self.adaptive_max:
            raise ValueError(
                f"adaptive_min must be at most adaptive_max, got {self.adaptive_min} and {self.adaptive_max}"
            )
        return self
