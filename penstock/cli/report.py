"""The table at the end of a run."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.orchestration.summary import Summary


def print_summary(summary: Summary) -> None:
    title = Text(f"penstock · {summary.name}")
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    if summary.heldout_reward_start is not None:
        end = "–" if summary.heldout_reward_end is None else f"{summary.heldout_reward_end:.3f}"
        table.add_row("held-out reward", f"{summary.heldout_reward_start:.3f} → {end}")
    if summary.train_reward_end is not None:
        table.add_row("training reward, last 8 steps", f"{summary.train_reward_end:.3f}")
    table.add_row("steps, samples", f"{summary.steps}, {summary.samples:,}")
    table.add_row("time, of it training", f"{summary.wall_s:.1f} s, {summary.training_s:.1f} s")
    table.add_row("generation", f"{summary.tokens_per_s:,.0f} tok/s ({summary.tokens:,} tokens)")
    table.add_row(
        "staleness per token", f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max:.0f}"
    )
    table.add_row("idle", f"trainer {summary.trainer_idle:.0%}, engines {summary.engine_idle:.0%}")
    stall, longest = summary.sync_stall_s * 1e3, summary.sync_stall_max_s * 1e3
    table.add_row("stalled by a weight update", f"median {stall:.1f} ms, max {longest:.1f} ms")
    table.add_row("dropped groups", _counts(summary.drops) or "none")
    if summary.failures:
        table.add_row("failed episodes", _counts(summary.failures))
    early = " (stopped early)" if summary.stopped_early else ""
    table.add_row("run folder", Text(summary.folder + early))
    Console().print(table)


def _counts(by_reason: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))
