"""Answers in a report. A model's text is hostile: everything is escaped, control characters are shown, and the page
runs no script at all."""

from collections.abc import Sequence
from html import escape

import numpy as np

from penstock.observe.events import SampleEvent
from penstock.observe.plain_text import plain_block, plain_line, without_middle
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.token_trace import TokenTrace
from penstock.observe.report.sample_choice import Chosen

SHOWN_TEXT = 3000
SHOWN_TOKENS = 1500
LEVELS = (0.01, 0.05, 0.2, 1.0, 3.0)
"""Gaps, in nats, from which on a token has the next colour."""


def sample_cards(run: RunReading, chosen: Sequence[Chosen]) -> str:
    cards = (_card(run.samples.read(one.row), one.why) for one in chosen)
    return "".join(cards) or '<p class="soft">none</p>'


def _card(sample: SampleEvent, why: str) -> str:
    facts = [why, "dropped as " + sample.drop if sample.drop else f"step {sample.step}"]
    if sample.reward is not None and not why.startswith("reward"):
        facts.append(f"reward {sample.reward:.3g}")
    facts += [f"{name} {value:.3g}" for name, value in list(sample.parts.items())[:8]]
    if sample.advantage is not None:
        facts.append(f"advantage {sample.advantage:+.2f}")
    facts.append(f"{sample.num_output_tokens} tokens, {sample.finish_reason or 'unfinished'}")
    if sample.age is not None:
        facts.append(f"oldest token {sample.age} steps behind")
    facts.append(f"task {sample.task_id}")
    shown = " · ".join(escape(plain_line(fact, 80)) for fact in facts)
    if not sample.text_kept:
        return f'<div class="sample"><p>{shown}</p><p>its text made room for newer ones</p></div>'
    texts = f"<pre>{_text(sample.prompt)}</pre><pre><b>{_text(sample.answer)}</b></pre>"
    return f'<div class="sample"><p>{shown}</p>{texts}</div>'


def _text(text: str) -> str:
    return escape(plain_block(without_middle(text, SHOWN_TEXT)))


def widest_trace(run: RunReading) -> TokenTrace | None:
    """The answer of the last traced steps on which engine and trainer differ most."""
    widest: TokenTrace | None = None
    size = -1.0
    for step, group, episode in run.traced[-40:]:
        for trace in run.tokens(step, group, episode):
            place = trace.worst
            if place is not None and abs(float(trace.gaps[place])) > size:
                widest, size = trace, abs(float(trace.gaps[place]))
    return widest


def token_text(trace: TokenTrace) -> str:
    """Tokens coloured by their gap. A bar stands where the weights changed; context is faint."""
    spans = []
    before: int | None = None
    start = max(0, (trace.worst or 0) - SHOWN_TOKENS // 2)
    for place in range(start, min(len(trace.texts), start + SHOWN_TOKENS)):
        version, gap = int(trace.versions[place]), float(trace.gaps[place])
        classes = []
        if np.isfinite(gap):
            level = sum(abs(gap) >= limit for limit in LEVELS)
            classes += [f"g{level}"] if level else []
        if not trace.loss_mask[place]:
            classes.append("out")
        if version >= 0 and before is not None and version != before:
            classes.append("seam")
        before = version if version >= 0 else before
        title = f"version {version}" if version >= 0 else "context"
        if np.isfinite(gap):
            title += (
                f", engine {trace.engine_logprobs[place]:.3f}, trainer {trace.trainer_logprobs[place]:.3f}, "
                f"gap {gap:+.4f}, advantage {trace.advantages[place]:+.2f}"
            )
        text = escape(plain_block(trace.texts[place]))
        spans.append(f'<span class="{" ".join(classes)}" title="{escape(title)}">{text}</span>')
    return f'<div class="tokens">{"".join(spans)}</div>'
