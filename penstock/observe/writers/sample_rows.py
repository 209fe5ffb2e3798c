"""Prepares what trackers get besides a step's metrics: a few answers as table rows, and the few metrics that
matter most grouped under names of their own."""

from collections.abc import Mapping, Sequence

from penstock.observe.events import SampleEvent
from penstock.observe.plain_text import plain_block, without_middle

COLUMNS = ("step", "group", "episode", "reward", "parts", "tokens", "age", "prompt", "answer")
Row = tuple[int, int, int, float | None, str, int, int | None, str, str]
SHOWN_TEXT = 2000
SAMPLES_OF_A_STEP = 8
EVERY_STEPS = 10
"""Steps between two tables."""
KEPT_ROWS = 256
"""wandb shows only the newest table, so each table has this many of the run's newest rows."""
OVERVIEW = (
    *("reward", "heldout_reward", "staleness_mean", "staleness_max", "ess", "kl", "entropy", "grad_norm"),
    *("answer_tokens_mean", "truncated_fraction", "tokens_per_s", "waited_s", "step_s", "logprob_gap_mean"),
)


def with_overview(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return all metrics, and the few that matter most once more as `overview/NAME`."""
    return {**metrics, **{f"overview/{name}": metrics[name] for name in OVERVIEW if name in metrics}}


def sample_row(sample: SampleEvent) -> Row:
    """Return a sample as a table row. Control characters are escaped, so that no viewer obeys them."""
    return (
        sample.step or 0,
        sample.group,
        sample.episode,
        sample.reward,
        ", ".join(f"{name} {value:.3g}" for name, value in sample.parts.items()),
        sample.num_output_tokens,
        sample.age,
        plain_block(without_middle(sample.prompt, SHOWN_TEXT)),
        plain_block(without_middle(sample.answer, SHOWN_TEXT)),
    )


def as_text(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown code block, in which a viewer interprets nothing."""
    lines = [
        line
        for row in rows
        for line in (
            f"reward {row[3]}  ({row[4]})  {row[5]} tokens, group {row[1]}, episode {row[2]}",
            *row[7].splitlines(),
            *row[8].splitlines(),
            "",
        )
    ]
    return "\n".join(f"    {line}" for line in lines)
