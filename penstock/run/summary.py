"""Summarises a run in `summary.json`."""

import html
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.observe.run_state import RunState
from penstock.safe_files import write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Holds the results of a run: `train` returns it, and it is `summary.json` in the run folder.

    Times are shares of the training phase, by `worked` (forward, backward, optimizer), `waited` (for groups; an
    engine for requests) and `other` (packing, metrics, weight updates, checkpoints). The web page splits them
    further.
    """

    name: str
    """The run's name."""
    folder: str
    """The run folder; the model is in `model` below it."""
    steps: int
    """Optimizer steps that were made."""
    samples: int
    """Episodes that were trained on."""
    wall_s: float
    """Seconds from start to end."""
    training_s: float
    """Seconds of the training phase."""
    heldout_reward_start: float | None
    """Mean held-out reward before the first step; None without held-out tasks."""
    heldout_reward_end: float | None
    """Mean held-out reward after the last step."""
    train_reward_end: float | None
    """Mean training reward of the last steps."""
    trainer_time: dict[str, float]
    """Shares of time in which the trainer worked, waited and did other things."""
    engine_time: dict[str, float]
    """The same of the engines, as their mean."""
    tokens: int
    """Tokens generated in the training phase."""
    tokens_per_s: float
    """Tokens generated per second in the training phase."""
    staleness_mean: float
    """Steps between sampling and training a token, mean of all steps."""
    staleness_max: float
    """The most steps between sampling and training a token in the run."""
    sync_stall_s: float
    """Median seconds of an update in which no forward pass could run. The first versions may take longer, since
    an engine then opens what it will read from."""
    sync_stall_max_s: float
    """Most seconds of an update in which no forward pass could run."""
    drops: dict[str, int]
    """Groups that were not trained, by reason."""
    failures: dict[str, int]
    """Episodes that failed, by reason."""
    failed_checkpoints: str
    """How many checkpoints could not be written, and why the last one failed; "" where all were written."""
    stopped_early: bool
    """Whether it ended before `run.steps`."""

    def rows(self) -> list[tuple[str, str]]:
        """Return what a person wants to know, as names and values."""
        rows: list[tuple[str, str]] = []
        if self.heldout_reward_start is not None:
            end = "–" if self.heldout_reward_end is None else f"{self.heldout_reward_end:.3f}"
            rows.append(("held-out reward", f"{self.heldout_reward_start:.3f} → {end}"))
        if self.train_reward_end is not None:
            rows.append(("training reward, last 8 steps", f"{self.train_reward_end:.3f}"))
        stall, longest = self.sync_stall_s * 1e3, self.sync_stall_max_s * 1e3
        rows += [
            ("steps, samples", f"{self.steps}, {self.samples:,}"),
            ("time, of it training", f"{self.wall_s:.1f} s, {self.training_s:.1f} s"),
            ("generation while training", f"{self.tokens_per_s:,.0f} tok/s ({self.tokens:,} tokens)"),
            ("staleness per token", f"mean {self.staleness_mean:.2f}, max {self.staleness_max:.0f}"),
            ("trainer", _times(self.trainer_time)),
            ("engines", _times(self.engine_time)),
            ("stalled by a weight update", f"median {stall:.1f} ms, max {longest:.1f} ms"),
            ("dropped groups", _counts(self.drops) or "none"),
        ]
        if self.failures:
            rows.append(("failed episodes", _counts(self.failures)))
        if self.failed_checkpoints:
            rows.append(("checkpoints", self.failed_checkpoints))
        rows.append(("run folder", self.folder + (" (stopped early)" if self.stopped_early else "")))
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            [f"penstock · {self.name}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
        )

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
            for name, value in self.rows()
        )
        return f"<table><caption>penstock · {html.escape(self.name)}</caption>{cells}</table>"

    def write(self, folder: Path) -> None:
        """Write `summary.json`. Numbers that JSON can't express (NaN, infinity) become null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        write_private(folder / "summary.json", json.dumps(plain, indent=2, allow_nan=False) + "\n")


def _times(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _counts(by_reason: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))


def summarise(state: RunState) -> Summary:
    """Compute the summary from the run's events alone."""
    training_s = max(1e-9, state.time_sheet.training_s)
    tokens = sum(engine.tokens_training for engine in state.engines)
    trainer, engines = state.time_sheet.sums()
    stalls = state.stalls or [0.0]
    heldout = [reward for _, reward in state.heldout]
    failed = state.failed_checkpoints
    return Summary(
        name=state.name,
        folder=state.folder,
        steps=state.num_steps,
        samples=state.num_samples,
        wall_s=state.now - state.started,
        training_s=training_s,
        heldout_reward_start=heldout[0] if heldout else None,
        heldout_reward_end=heldout[-1] if len(heldout) > 1 else None,
        train_reward_end=state.recent_reward,
        trainer_time=trainer,
        engine_time=engines,
        tokens=int(tokens),
        tokens_per_s=tokens / training_s,
        staleness_mean=state.staleness_sum / max(1, state.num_steps),
        staleness_max=state.staleness_max,
        sync_stall_s=statistics.median(stalls),
        sync_stall_max_s=max(stalls),
        drops=dict(state.drops),
        failures=dict(state.failures),
        failed_checkpoints=""
        if failed is None
        else f"{failed[0]} could not be written, the last of step {failed[1]}: {failed[2]}",
        stopped_early=state.step < state.steps_planned,
    )
