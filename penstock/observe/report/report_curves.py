"""Which curves a report draws, for its page and for its pictures."""

from dataclasses import dataclass

import numpy as np

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.report.svg_plots import Curve

BUCKETS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    title: str
    file: str
    curves: list[Curve]


PLOTS = (
    ("Reward", "reward", ("reward",)),
    ("Staleness of trained tokens, steps", "staleness", ("staleness_mean", "staleness_max", "max_staleness")),
    ("Answer length, tokens", "length", ("answer_tokens_mean",)),
    ("Entropy", "entropy", ("entropy",)),
    ("KL to the policy that sampled", "kl", ("kl",)),
    ("Effective sample size", "ess", ("ess",)),
    ("Gradient norm", "grad_norm", ("grad_norm",)),
    ("Tokens generated a second", "tokens", ("tokens_per_s",)),
    ("Cut off at the token limit", "truncated", ("truncated_fraction",)),
)


def plots_of(run: RunReading) -> list[Plot]:
    """Those that have points."""
    plots = [Plot(title=title, file=file, curves=_curves(run, names)) for title, file, names in PLOTS]
    plots[0].curves.extend(_heldout(run))
    parts = [
        name
        for name in run.steps.names
        if name.startswith("reward_") and name not in ("reward_mean", "reward_std")
    ]
    if len(parts) > 1:
        plots.insert(
            1, Plot(title="Reward by part", file="reward_parts", curves=_curves(run, tuple(parts[:8])))
        )
    return [plot for plot in plots if plot.curves]


def _curves(run: RunReading, names: tuple[str, ...]) -> list[Curve]:
    found = []
    for name in names:
        points = run.steps.thinned(name, buckets=BUCKETS)
        if points:
            is_thin = any(point.low < point.high for point in points)
            found.append(
                Curve(
                    name=name,
                    x=[point.x for point in points],
                    y=[point.mean for point in points],
                    low=[point.low for point in points] if is_thin else (),
                    high=[point.high for point in points] if is_thin else (),
                )
            )
    return found


def _heldout(run: RunReading) -> list[Curve]:
    points = [(step, reward) for step, reward in run.state.heldout if np.isfinite(reward)]
    if not points:
        return []
    return [
        Curve(name="held-out", x=[step for step, _ in points], y=[reward for _, reward in points], dots=True)
    ]
