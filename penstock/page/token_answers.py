"""Answers requests for the tokens of one sample, with all that is known of each as arrays of one length."""

from typing import Any

import numpy as np

from penstock.observe.reading.run_reading import RunReading
from penstock.page.query_values import Refused
from penstock.page.sample_answers import check_row, describe

DIGITS = 5
UNKNOWN = 255
"""Value in `clipped` where nothing is known."""


def show_tokens(run: RunReading, row: int) -> dict[str, Any]:
    """Return the traced tokens of an answer. An episode of several samples has several traces."""
    check_row(run, row)
    sample = describe(run, row)
    step = -1 if sample["step"] is None else sample["step"]
    traces = run.tokens(step, sample["group"], sample["episode"])
    if not traces:
        raise Refused(
            "the tokens of this answer are not kept: a run keeps those of some answers of every step "
            "(observe.tokens_mb)",
            404,
        )
    return {"sample": sample, "traces": [_describe(trace) for trace in traces]}


def nearest_traced(run: RunReading) -> dict[str, Any]:
    """Return answers whose tokens are kept, newest first, for the page to offer."""
    rows = np.flatnonzero(run.samples.columns["traced"])[::-1][:40]
    return {"rows": [describe(run, int(row), shorten=True) for row in rows]}


def _describe(trace: Any) -> dict[str, Any]:
    return {
        "step": trace.step,
        "texts": list(trace.texts),
        "ids": trace.token_ids.tolist(),
        "versions": trace.versions.tolist(),
        "mask": np.asarray(trace.loss_mask).astype(int).tolist(),
        "ages": trace.ages.tolist(),
        "engine": _numbers(trace.engine_logprobs),
        "trainer": _numbers(trace.trainer_logprobs),
        "gap": _numbers(trace.gaps),
        "ratio": _numbers(trace.ratios),
        "clipped": [None if one == UNKNOWN else bool(one) for one in trace.clipped.tolist()],
        "weight": _numbers(trace.weights),
        "advantage": _numbers(trace.advantages),
        "worst": trace.worst,
    }


def _numbers(values: Any) -> list[float]:
    """Round to plain floats. NaN stays, and becomes null in JSON."""
    found: list[float] = np.round(np.asarray(values, dtype=np.float64), DIGITS).tolist()
    return found
