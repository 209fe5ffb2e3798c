"""Draws the live view of a run: does it learn, is it fast, who waits and why.

    penstock · demo · training             step 77/200   18 s, about 29 s to go
    reward     0.920  ▃▃▃▄▅▆▆▇▇▇██   0.260 at first   held-out 0.264 → 0.861
    answers    14 tokens, longest 32   2% cut off   7,714 tok/s
    staleness  mean 3.00, bound 4   ages 1 ▁ 2–3 █ 4–7 ▂   max 4 so far
    limit      engines: trainer waits for groups 49% of the time
    flow       64 generating > 10 scoring > 38 ready > step 78   at most 80 groups
    trainer    ██████······  51%  waiting for groups: 5 of 8 ready
    engine0    ████████····  64%  24 running, 0 waiting
    last       reward 1, versions 74–76: 12 × 7 = → 84

There is also a line for the experts of a mixture model, and one for the metrics of a user's own loss. A fact
that does not fit into its line is left out whole; only the end of a line may be cut.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from penstock.observe.durations import duration
from penstock.observe.plain_text import plain_line
from penstock.observe.status import (
    AgeStatus,
    BottleneckStatus,
    ExpertStatus,
    ProcessStatus,
    RunStatus,
    SampleStatus,
)

BARS = "▁▂▃▄▅▆▇█"
LABEL_WIDTH = 11
MAX_PROCESSES = 9
GAP = "   "
PROMPT_END = 24
"""Characters that are shown of the newest sample's prompt: the last ones, where the question is."""
ECHO = 2
"""Columns kept free where the cursor rests: a terminal echoes `^C` there, and the line must not wrap."""


class Screen:
    """Draws a status with rich, laid out for the width at hand. With a clock, the elapsed time advances between
    updates."""

    def __init__(self, status: RunStatus, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._status = status
        self._clock = clock
        self._made = clock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        elapsed_s = self._status.elapsed_s + self._clock() - self._made
        yield from lines(dataclasses.replace(self._status, elapsed_s=elapsed_s), options.max_width)


def lines(status: RunStatus, width: int) -> list[Text]:
    """Return lines of at most `width` cells. Facts that are not known yet have no line."""
    rows = [_title(status, width - ECHO)]
    if status.reward is not None or status.heldout:
        rows.append(_row("reward", _reward_facts(status, width), width))
    if status.answers is not None:
        rows.append(_row("answers", _answer_facts(status), width))
        rows.append(_row("staleness", _staleness_facts(status), width))
    if status.own_metrics:
        rows.append(_row("loss", _own_facts(status), width))
    if status.experts is not None:
        rows.append(_row("experts", _expert_facts(status.experts), width))
    if status.bottleneck is not None:
        rows.append(_row("limit", [_bottleneck(status.bottleneck)], width))
    if status.flow is not None:
        rows.append(_row("flow", _flow_facts(status), width))
    if status.drops:
        drops = [f"{count} {plain_line(reason)}" for reason, count in sorted(status.drops.items())]
        rows.append(_row("dropped", [Text(", ".join(drops), style="yellow")], width))
    if status.failed_checkpoints is not None:
        number, step, why = status.failed_checkpoints
        what = f"{number} checkpoints" if number > 1 else "1 checkpoint"
        words = f"{what} could not be written, the last of step {step}: {plain_line(why)}"
        rows.append(_row("unsaved", [Text(words, style="red")], width))
    shown = status.processes[:MAX_PROCESSES]
    rows += [_process(process, width) for process in shown if process.doing or process.busy]
    if len(shown) < len(status.processes):
        rows.append(_row("", [f"and {len(status.processes) - len(shown)} more"], width))
    if status.last_sample is not None:
        rows.append(_row("last", [_sample(status.last_sample)], width))
    return [*rows[:-1], _cut(rows[-1], width - ECHO)]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw the last values as bars, on a scale from 0 to 1 or wider if they need it."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(BARS[min(7, int((value - low) / (high - low) * 8))] for value in shown)


def time_facts(status: RunStatus) -> str:
    left = "" if status.left_s is None else f", about {duration(status.left_s)} to go"
    return f"{duration(status.elapsed_s)}{left}"


def _title(status: RunStatus, width: int) -> Text:
    times = f"step {status.step}/{status.steps}{GAP}{time_facts(status)}"
    name = Text(f"penstock · {plain_line(status.name)} · {plain_line(status.phase)}", style="bold")
    room = width - cell_len(times) - len(GAP)
    if room < 16:
        return _cut(name, width)
    name = _cut(name, room)
    return Text.assemble(name, " " * (width - cell_len(times) - name.cell_len), times, no_wrap=True)


def _reward_facts(status: RunStatus, width: int) -> list[Text | str]:
    facts: list[Text | str] = []
    if status.reward is not None:
        bars = sparkline(status.rewards, 12 if width < 100 else 40)
        facts.append(Text.assemble((f"{status.reward:.3f}", "bold"), "  ", (bars, "green")))
    if status.heldout:
        (_, first), (_, last) = status.heldout[0], status.heldout[-1]
        change = f"{first:.3f}" if len(status.heldout) == 1 else f"{first:.3f} → {last:.3f}"
        facts.append(f"held-out {change}")
    if status.first_reward is not None:
        facts.append(f"{status.first_reward:.3f} at first")
    return facts


def _answer_facts(status: RunStatus) -> list[Text | str]:
    answers = status.answers
    assert answers is not None
    return [
        f"{answers.tokens_mean:,.0f} tokens, longest {answers.tokens_max:,.0f}",
        f"{answers.truncated:.0%} cut off",
        f"{status.tokens_per_s:,.0f} tok/s",
    ]


def _staleness_facts(status: RunStatus) -> list[Text | str]:
    bound = "" if status.staleness_bound is None else f", bound {status.staleness_bound}"
    ages = [Text.assemble(f" {_age(age)} ", (sparkline((age.share,)), "green")) for age in status.ages]
    return [
        f"mean {status.staleness_mean:.2f}{bound}",
        *([Text.assemble("ages", *ages)] if ages else []),
        f"max {status.staleness_max:.0f} so far",
    ]


def _own_facts(status: RunStatus) -> list[Text | str]:
    return [f"{plain_line(name)} {value:.4g}" for name, value in status.own_metrics.items()]


def _expert_facts(experts: ExpertStatus) -> list[Text | str]:
    return [
        f"{experts.replayed:.0%} replayed, {_or_dash(experts.flipped, '.1%')} flipped",
        f"logprob gap {_or_dash(experts.gap, '.4f')}, without replay {_or_dash(experts.gap_without, '.4f')}",
    ]


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _age(age: AgeStatus) -> str:
    if age.last is None:
        return f"{age.first}+"
    return str(age.first) if age.last == age.first else f"{age.first}–{age.last}"


def _bottleneck(bottleneck: BottleneckStatus) -> Text:
    return Text.assemble((bottleneck.who, "bold"), f": {bottleneck.why}")


def _flow_facts(status: RunStatus) -> list[Text | str]:
    flow = status.flow
    assert flow is not None
    way = (
        f"{flow.generating} generating > {flow.scoring} scoring > {flow.ready} ready > step {status.step + 1}"
    )
    return [way, f"at most {flow.limit} groups"]


def _process(process: ProcessStatus, width: int, size: int = 12) -> Text:
    filled = round(process.busy * size)
    style = "green" if process.busy > 0.5 else "yellow" if process.busy > 0.15 else "red"
    bar = Text.assemble(("█" * filled, style), ("·" * (size - filled), "dim"), f" {process.busy:4.0%}")
    doing = Text(plain_line(process.doing), style="dim")
    return _row(plain_line(process.name), [Text.assemble(bar, "  ", doing)], width)


def _sample(sample: SampleStatus) -> Text:
    oldest, newest = sample.oldest_version, sample.newest_version
    versions = "" if newest is None else f", version {newest}"
    if newest != oldest:
        versions = f", versions {oldest}–{newest}"
    asked = plain_line(sample.prompt[-PROMPT_END:].strip())
    return Text.assemble(
        f"reward {sample.reward:.3g}{versions}: ", asked, " → ", (plain_line(sample.text), "dim")
    )


def _row(label: str, facts: Iterable[Text | str], width: int) -> Text:
    """Return a label and as many facts as fit. The first is always shown, cut if necessary."""
    row = Text.assemble((f"{label:<{LABEL_WIDTH - 1}} ", "dim"))
    for number, fact in enumerate(facts):
        piece = Text(fact) if isinstance(fact, str) else fact
        if number == 0:
            row.append_text(piece)
        elif row.cell_len + len(GAP) + piece.cell_len <= width:
            row.append(GAP).append_text(piece)
    return _cut(row, width)


def _cut(text: Text, width: int) -> Text:
    cut = text.copy()
    cut.truncate(width, overflow="ellipsis")
    cut.no_wrap = True
    return cut
