"""Answers questions about staleness: tokens by age and cause, how far the policy moved by age, and other bounds."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.observe.reading.run_reading import RunReading
from penstock.page.query_values import span_of

BY_AGE = ("ess", "kl", "clip_fraction", "ratio_mean")
GAPS = {"gap_low": "ratio_p01", "gap_high": "ratio_p99"}
"""98 % of the gaps (the trainer's logprob minus the engine's) lie between these."""
AGE = re.compile(r"tokens_age_(?P<first>\d+)(?:_(?P<last>\d+|up))?")


def show_ages(run: RunReading, query: Mapping[str, str]) -> dict[str, Any]:
    span = span_of(query, "step")
    first, last = (None, None) if span is None else (_step(span[0]), _step(span[1]))
    status = run.status()
    return {
        "bound": status.staleness_bound,
        "mean": status.staleness_mean,
        "bars": [
            {"age": bar.age, "tokens": bar.tokens, "generating": bar.generating, "waiting": bar.waiting}
            for bar in run.staleness.histogram(first, last)
        ],
        "generating": sorted(run.staleness.generating().items()),
        "waiting": sorted(run.staleness.waiting().items()),
        "what_if": [
            {
                "bound": one.bound,
                "groups_too_old": one.groups_too_old,
                "tokens_too_old": one.tokens_too_old,
                "drops_spared": one.drops_spared,
            }
            for one in run.staleness.what_if(run.drops)
        ],
        "by_age": by_age(run, first, last),
    }


def _step(value: float) -> int | None:
    return int(value) if np.isfinite(value) else None


def by_age(run: RunReading, first: int | None, last: int | None) -> list[dict[str, Any]]:
    """Return a row for each range of ages, youngest first: its share of tokens in these steps, and means over
    the steps, weighted by that share."""
    numbers = run.steps.numbers
    inside = (numbers >= (first or 0)) & (numbers <= (last if last is not None else np.inf))
    known = set(run.steps.names)
    found = []
    for name in run.steps.names:
        age = AGE.fullmatch(name)
        if age is None:
            continue
        suffix = name.removeprefix("tokens")
        shares = np.nan_to_num(run.steps.column(name)[inside])
        means = {
            metric: _mean(run.steps.column(metric + suffix)[inside], shares)
            for metric in BY_AGE
            if metric + suffix in known
        }
        for end, ratio in GAPS.items():
            if ratio + suffix in known:
                with np.errstate(divide="ignore", invalid="ignore"):
                    gaps = np.log(run.steps.column(ratio + suffix)[inside])  # ratio = exp(gap)
                means[end] = _mean(gaps, shares)
        share = float(shares.mean()) if len(shares) else 0.0
        found.append({"first": int(age["first"]), "last": age["last"], "share": share, **means})
    return sorted(found, key=lambda row: row["first"])


def _mean(values: Any, weights: Any) -> float | None:
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else None
