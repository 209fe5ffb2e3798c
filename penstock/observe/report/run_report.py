"""`penstock report`: what was trained, curves, where the time went, answers, and warnings, in one file.

The page has no script and asks for nothing over the network: its content-security policy allows its own style sheet
and nothing else.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.observe.durations import duration
from penstock.observe.plain_text import plain_block, plain_line
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.run_warnings import warnings_of
from penstock.observe.report.report_curves import plots_of
from penstock.observe.report.report_samples import sample_cards, token_text, widest_trace
from penstock.observe.report.report_style import STYLE
from penstock.observe.report.sample_choice import best, odd, worst
from penstock.observe.report.svg_plots import bars, curves, shares
from penstock.safe_files import write_private

NAME = "report.html"
TRAINED = (
    ("model", "model.name"),
    ("tasks", "tasks.source"),
    ("held-out tasks", "eval.tasks.source"),
    ("advantage", "algorithm.advantage"),
    ("loss", "algorithm.loss"),
    ("learning rate", "trainer.learning_rate"),
    ("groups a step", "rollout.groups_per_step"),
    ("answers a group", "rollout.group_size"),
    ("longest answer, tokens", "rollout.max_new_tokens"),
    ("temperature", "rollout.temperature"),
    ("bound of staleness", "staleness.max_staleness"),
    ("late groups", "staleness.late"),
    ("engines", "engine.kind"),
    ("seed", "run.seed"),
)


def write_report(run: RunReading, path: Path | None = None) -> Path:
    path = path or run.folder / NAME
    write_private(path, report_html(run))
    return path


def report_html(run: RunReading) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = (
        _lead(run),
        _facts(run),
        _section("Warnings", _warnings(run)),
        _section("What was trained", _trained(run)),
        _section(
            "Curves",
            f'<div class="plots">{"".join(curves(one.title, one.curves) for one in plots_of(run))}</div>',
        ),
        _section("Where the time went", _time(run)),
        _section("Staleness", _staleness(run)),
        _section("Drops", _drops(run)),
        _section("Samples", _samples(run)),
        _section("Tokens", _tokens(run)),
        _section("Config", _config(run.config)),
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{_line(run.name)} · penstock report</title><style>{STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _lead(run: RunReading) -> str:
    status = run.status()
    began = datetime.fromtimestamp(run.started_s or 0.0, UTC).strftime("%d %B %Y, %H:%M UTC")
    how = (
        "goes on"
        if run.is_running
        else "ended"
        if status.phase == "done"
        else f"stopped while {status.phase}"
    )
    words = f"{status.step} of {status.steps} steps in {duration(run.now)}; it {how}."
    if len(status.heldout) > 1:
        words += f" Held-out reward went from {status.heldout[0][1]:.3f} to {status.heldout[-1][1]:.3f}."
    elif status.first_reward is not None and status.reward is not None:
        words += f" Training reward went from {status.first_reward:.3f} to {status.reward:.3f}."
    made = f"penstock {__version__} · began {began}"
    return f'<h1>{_line(run.name)}</h1><p class="soft">{made}</p><p class="lead">{_line(words)}</p>'


def _facts(run: RunReading) -> str:
    status, cost = run.status(), run.cost()
    facts = [
        ("steps", f"{status.step:,}"),
        ("samples trained", f"{status.samples:,}"),
        ("tokens generated", f"{cost.tokens:,.0f}"),
        ("training reward", "–" if status.reward is None else f"{status.reward:.3f}"),
        ("groups dropped", f"{sum(status.drops.values()):,}"),
        ("staleness, max", f"{status.staleness_max:.0f}"),
    ]
    if cost.num_gpus:
        facts += [
            ("GPU-hours", f"{cost.gpu_hours:.2f}"),
            ("tokens per GPU-hour", f"{cost.tokens_per_gpu_hour or 0:,.0f}"),
        ]
    if cost.price is not None:
        facts.append(("cost", f"{cost.price:,.2f}"))
    cells = "".join(f"<div><b>{_line(value)}</b><span>{_line(name)}</span></div>" for name, value in facts)
    return f'<div class="facts">{cells}</div>'


def _warnings(run: RunReading) -> str:
    entries = (
        f'<li><b>{_line(one.what)}</b>: {_line(one.why)}.<br><span class="soft">{_line(one.fix)}</span></li>'
        for one in warnings_of(run)
    )
    found = "".join(entries)
    return (
        f'<ul class="warnings">{found}</ul>'
        if found
        else "<p>None of the rules that a report knows applies.</p>"
    )


def _trained(run: RunReading) -> str:
    rows = [(name, _setting(run.config, key)) for name, key in TRAINED]
    return _table(("", ""), [(name, value) for name, value in rows if value])


def _time(run: RunReading) -> str:
    sheet = run.time_sheet()
    if not sheet:
        return '<p class="soft">The run has not trained yet.</p>'
    limit = run.state.status().bottleneck
    said = f"<p>It was limited by {_line(limit.who)}: {_line(limit.why)}.</p>" if limit is not None else ""
    drawn = shares(
        f"shares of the {duration(sheet[0].total_s)} in which the run trained",
        [(one.process, one.shares) for one in sheet],
    )
    names = list(dict.fromkeys(name for one in sheet for name in one.parts))
    rows = [
        (name, *(f"{one.shares.get(name, 0):.1%}" if name in one.parts else "" for one in sheet))
        for name in names
    ]
    return f'{said}<div class="plots">{drawn}</div>' + _table(
        ("", *(one.process for one in sheet)), rows, numbers=True
    )


def _staleness(run: RunReading) -> str:
    histogram = run.staleness.histogram()
    if not histogram:
        return '<p class="soft">Nothing was trained yet.</p>'
    parts: dict[str, list[float]] = {
        "gained while generating": [bar.tokens * bar.generating / max(1, bar.age) for bar in histogram],
        "gained while waiting": [bar.tokens * bar.waiting / max(1, bar.age) for bar in histogram],
        "fresh": [bar.tokens * (bar.age == 0) for bar in histogram],
    }
    drawn = bars(
        "Trained tokens by age in steps, by how they grew old",
        [str(bar.age) for bar in histogram],
        parts,
        x_label="age",
    )
    rows = [
        (str(one.bound), f"{one.groups_too_old:,}", f"{one.tokens_too_old:,}", f"{one.drops_spared:,}")
        for one in run.staleness.what_if(run.drops)
    ]
    head = ("if the bound were", "trained groups too old", "trained tokens too old", "drops within it")
    return f'<div class="plots">{drawn}</div><h3>Other bounds, counted on this run</h3>' + _table(
        head, rows, numbers=True
    )


def _drops(run: RunReading) -> str:
    if not run.drops:
        return "<p>No group was dropped.</p>"
    reasons: dict[str, list[int]] = {}
    for drop in run.drops:
        reasons.setdefault(drop.reason, []).append(drop.num_tokens)
    rows = [(reason, f"{len(tokens):,}", f"{sum(tokens):,}") for reason, tokens in sorted(reasons.items())]
    lengths = run.samples.columns["tokens"]
    kept, lost = run.samples.select(drop="none"), run.samples.select(drop="any")
    mean = [f"{lengths[rows_].mean():.1f}" if rows_.size else "–" for rows_ in (kept, lost)]
    last = run.drops[-1]
    return (
        _table(("reason", "groups", "tokens lost"), rows, numbers=True)
        + f"<p>Mean answer length: {mean[0]} tokens kept, {mean[1]} dropped. The last: {_line(last.message)}</p>"
    )


def _samples(run: RunReading) -> str:
    return "".join(
        f"<h3>{title}</h3>{sample_cards(run, chosen)}"
        for title, chosen in (("Best", best(run)), ("Worst", worst(run)), ("Odd", odd(run)))
    )


def _tokens(run: RunReading) -> str:
    trace = widest_trace(run)
    if trace is None or trace.worst is None:
        return '<p class="soft">No tokens were kept.</p>'
    size = abs(float(trace.gaps[trace.worst]))
    return (
        "<p>Of the last answers whose tokens are kept, the one on which engine and trainer differ most: step "
        f"{trace.step}, group {trace.group}, at most {size:.3g} nats. Coloured by that gap from 0.01 nats on; "
        f"faint tokens are context, a violet bar is where the weights changed.</p>{token_text(trace)}"
    )


def _config(config: Mapping[str, Any]) -> str:
    import yaml

    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return f"<details><summary>All settings</summary><pre>{escape(plain_block(text))}</pre></details>"


def _setting(config: Mapping[str, Any], key: str) -> str:
    value: Any = config
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def _section(title: str, content: str) -> str:
    return f"<h2>{_line(title)}</h2>{content}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    def cell(kind: str, place: int, value: str) -> str:
        style = ' class="n"' if numbers and place else ""
        return f"<{kind}{style}>{_line(value)}</{kind}>"

    top = "".join(cell("th", place, value) for place, value in enumerate(head)) if any(head) else ""
    body = "".join(
        f"<tr>{''.join(cell('td', place, value) for place, value in enumerate(row))}</tr>" for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def _line(text: str) -> str:
    return escape(plain_line(text, 400))
