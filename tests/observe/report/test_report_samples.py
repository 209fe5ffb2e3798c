from pathlib import Path

import msgspec

from penstock.observe.reading.token_trace import TokenTrace
from penstock.observe.report.report_samples import token_text, widest_trace
from tests.observe.examples import TEXTS, TOKENS, column, run_event, step
from tests.observe.store.written import read, sample, write


def test_tokens_show_their_gap_and_the_seam() -> None:
    html = token_text(TokenTrace.of(TOKENS, TEXTS.texts))
    spans = html.removeprefix('<div class="tokens">').split("</span>")[:4]
    assert [span.split('"')[1] for span in spans] == ["out", "g3", "g3 seam", "out"]
    assert "gap -0.7500" in spans[2] and "&lt;script&gt;" in spans[2]


def test_the_widest_gap_is_found(tmp_path: Path) -> None:
    wide = msgspec.structs.replace(TOKENS, group=5, gaps=column("<f4", 4.0, 0.0))
    write(
        tmp_path,
        [run_event(), TEXTS, TOKENS, wide, sample(3, traced=True), sample(5, traced=True), step(2, 105.0)],
    )
    trace = widest_trace(read(tmp_path))
    assert trace is not None and trace.group == 5
