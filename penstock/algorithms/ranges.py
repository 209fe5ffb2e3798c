"""Says which values a parameter of an algorithm may have, beside the parameter: `cap: Positive = 2.0`."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Holds the finite numbers between two bounds. `rule` is the wording for error messages."""

    rule: str
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def holds(self, value: float) -> bool:
        if not (math.isfinite(value) and self.low <= value <= self.high):
            return False
        return not (self.open_low and value == self.low)


ANY = Range(rule="a finite number")

Positive = Annotated[float, Range(rule="> 0", low=0, open_low=True)]
NotNegative = Annotated[float, Range(rule=">= 0", low=0)]
AtLeastOne = Annotated[float, Range(rule=">= 1", low=1)]
Fraction = Annotated[float, Range(rule="between 0 and 1", low=0, high=1)]
