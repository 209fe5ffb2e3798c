"""Writes the page of one run as a single file for `penstock report`, with all the answers that it would request.

The page's modules, its style and the answers are inlined, so it needs no server and makes no request: the
content-security policy names the script and the style by their hashes, and forbids all else. What a model
wrote is a string in JSON, and becomes a text node.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, get_args

import numpy as np

from penstock import __version__
from penstock.observe.plain_text import plain_line, without_middle, without_middles
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.step_table import Axis
from penstock.page.age_answers import show_ages
from penstock.page.chart_answers import last_step, list_metrics, thinned
from penstock.page.drop_answers import show_drops
from penstock.page.findings import show_findings
from penstock.page.json_answer import encode
from penstock.page.now_answers import show_config, show_lines, show_machine, show_now, show_time
from penstock.page.page_files import page_files
from penstock.page.query_values import Refused
from penstock.page.sample_answers import count_samples, describe, list_samples
from penstock.page.timeline_answers import show_timeline
from penstock.page.token_answers import show_tokens
from penstock.safe_files import write_private

NAME = "report.html"
MAX_SAMPLES = 200
"""Most samples: the chosen answers, then some dropped ones, those with tokens and the newest, each with its
group."""
MAX_DROPPED = 20
MAX_TEXT = 8000
MAX_TOKENS = 20_000
"""Most tokens shown one by one, over all answers."""
MAX_SPANS = 5000
BUCKETS = 240
DIGITS = 6
STYLES = re.compile(r'<link rel="stylesheet" href="(.*?)" />')
IMPORT = re.compile(r'^import { (.*?) } from "(.*?)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def write_report(run: RunReading, path: Path | None = None) -> Path:
    path = path or run.folder / NAME
    write_private(path, report_html(run))
    return path


def report_html(run: RunReading) -> str:
    page = page_text("/index.html")
    style = "".join(page_text(f"/{name}") for name in STYLES.findall(page))
    script = page_text("/vendor/uPlot.iife.min.js") + bundle("/main.js")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    answers = encode(answers_of(run)).decode().replace("<", "\\u003c")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(plain_line(run.name, 400))} · penstock report</title><style>{style}</style></head>"
    )
    body = page[page.index("<body>") : page.index("</body>")]
    data = f'<script type="application/json" id="answers">{answers}</script>'
    return f"{head}{body}{data}<script>{script}</script></body></html>\n"


def page_text(path: str) -> str:
    return page_files()[path][0].decode()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(start: str) -> str:
    """Join the page's modules into one script: each becomes a function that runs once, after those that it
    imports."""
    bodies: dict[str, str] = {}

    def add(path: str) -> None:
        source = page_text(path)
        places = {name: _resolved(path, name) for _, name in IMPORT.findall(source)}
        for place in places.values():
            if place not in bodies:
                add(place)
        source = IMPORT.sub(lambda one: f'const {{ {one[1]} }} = modules["{places[one[2]]}"];', source)
        names = ", ".join(name for _, name in EXPORT.findall(source))
        source = EXPORT.sub(r"\1", source)
        bodies[path] = f'modules["{path}"] = (() => {{\n{source}return {{ {names} }};\n}})();\n'

    add(start)
    return f'\n(() => {{\n"use strict";\nconst modules = {{}};\n{"".join(bodies.values())}}})();\n'


def _resolved(path: str, name: str) -> str:
    """Return the absolute path of an import: `../dom.js` in `/views/now.js` is `/dom.js`."""
    folder = path.rpartition("/")[0]
    while name.startswith("../"):
        folder, name = folder.rpartition("/")[0], name[3:]
    return f"{folder}/{name.removeprefix('./')}"


def answers_of(run: RunReading) -> dict[str, Any]:
    """Return the answers that the page requests, keyed as `static/exported.js` looks them up."""
    findings = show_findings(run)
    tokens = _tokens(run, findings["widest"])
    chosen = [one["row"] for _, rows in findings["answers"] for one in rows]
    dropped = run.samples.select(drop="any")[::-1][:MAX_DROPPED].tolist()
    samples = [_described(run, row) for row in _rows(run, [*chosen, *dropped, *tokens])]
    return {
        "written": f"penstock {__version__} on {datetime.now(UTC):%d %B %Y}",
        "runs": {"runs": [show_now(run)]},
        "findings": findings,
        "now": show_now(run),
        "lines": show_lines(run),
        "time": show_time(run),
        "ages": show_ages(run, {}),
        "drops": show_drops(run, {}),
        "timeline": show_timeline(run, {"limit": str(MAX_SPANS)}),
        "metrics": list_metrics(run),
        "machine": show_machine(run),
        "config": show_config(run),
        "counts": count_samples(run, {}),
        "samples": {**list_samples(run, {"limit": "0"}), "rows": samples},
        "tokens": tokens,
        "curves": {axis: _curves(run, axis) for axis in get_args(Axis)},
        "last": last_step(run),
    }


def _curves(run: RunReading, axis: Axis) -> dict[str, Any]:
    return {name: _short(thinned(run, name, axis, BUCKETS)) for name in run.steps.names}


def _short(columns: list[list[float]]) -> list[list[float]]:
    return [[float(f"{value:.{DIGITS}g}") for value in column] for column in columns]


def _tokens(run: RunReading, widest: dict[str, Any] | None) -> dict[int, Any]:
    """Collect tokens: of the answer on which engine and trainer differ most, then of the newest, up to
    `MAX_TOKENS`."""
    rows = np.flatnonzero(run.samples.columns["traced"])[::-1].tolist()
    if widest is not None and widest["row"] is not None:
        rows.insert(0, widest["row"])
    found, room = dict[int, Any](), MAX_TOKENS
    for row in dict.fromkeys(rows):
        try:
            shown = show_tokens(run, row)
        except Refused:
            continue
        room -= sum(len(trace["ids"]) for trace in shown["traces"])
        if room < 0:
            break
        found[row] = {**shown, "sample": _described(run, row)}
    return found


def _rows(run: RunReading, first: Iterable[int]) -> list[int]:
    """Choose rows: `first`, then the newest, each with its whole group. Returned in the order of the run."""
    found = set[int]()
    for row in (*first, *reversed(range(len(run.samples)))):
        if len(found) >= MAX_SAMPLES:
            break
        if row not in found:
            found |= set(run.samples.select(group=int(run.samples.columns["group"][row])).tolist())
    return sorted(found)


def _described(run: RunReading, row: int) -> dict[str, Any]:
    sample = describe(run, row)
    parts = sample["transcript"]
    texts = without_middles([part["text"] for part in parts], MAX_TEXT)
    return sample | {
        **{name: without_middle(sample[name], MAX_TEXT) for name in ("prompt", "answer")},
        "transcript": [part | {"text": text} for part, text in zip(parts, texts, strict=True)],
    }
