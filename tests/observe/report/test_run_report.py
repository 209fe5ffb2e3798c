import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from benchmarks.made_run import write_made_run
from penstock.observe.events import ConfigEvent, LogLine, TokenTexts
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.report.run_report import report_html, write_report
from tests.observe.examples import TOKENS, drop, phase, run_event, step
from tests.observe.report.hostile import HOSTILE
from tests.observe.store.written import read, sample, write


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunReading:
    run = RunReading(write_made_run(tmp_path_factory.mktemp("runs") / "made", steps=120))
    run.refresh()
    return run


def test_a_report_says_what_happened(made: RunReading) -> None:
    text = Tags(report_html(made)).text
    for words in (
        "120 of 120 steps",
        "Where the time went",
        "trained groups too old",
        "made up",
        "What comes after",
        "engine and trainer differ most",
        "the longest answer",
        "All settings",
    ):
        assert words in text, words


def test_it_is_one_file_that_runs_and_asks_for_nothing(made: RunReading) -> None:
    html = write_report(made).read_text()
    tags = Tags(html)
    assert not tags.names & {"script", "img", "link", "iframe", "object", "a", "form", "base"}
    assert not {name for name in tags.attributes if name.startswith("on") or name in ("src", "href", "style")}
    assert "default-src 'none'" in html
    assert (made.folder / "report.html").stat().st_mode & 0o777 == 0o600


def test_a_models_words_are_never_markup(tmp_path: Path) -> None:
    every = " ".join(HOSTILE)
    write(
        tmp_path,
        [
            msgspec.structs.replace(run_event(), name=every),
            ConfigEvent(
                process="controller",
                time=100.0,
                config=msgspec.json.encode({"run": {"name": HOSTILE[0]}}).decode(),
            ),
            phase("training", 100.5),
            TokenTexts(process="controller", time=101.0, texts={7: HOSTILE[0], 8: HOSTILE[1], 9: HOSTILE[2]}),
            *(
                sample(number, prompt=text, answer=text, task_id=text, finish_reason=text, traced=number == 0)
                for number, text in enumerate(HOSTILE)
            ),
            msgspec.structs.replace(TOKENS, group=0),
            step(2, 104.0),
            sample(90, step=None, drop=HOSTILE[0], parts={HOSTILE[1]: 1.0}, time=105.0),
            msgspec.structs.replace(drop(HOSTILE[0], 105.0), message=HOSTILE[1]),
            LogLine(process="controller", time=105.0, line=every),
        ],
    )
    html = report_html(read(tmp_path))
    tags = Tags(html)
    assert not tags.names & {"script", "img", "a", "object"}
    assert not {name for name in tags.attributes if name.startswith("on")}
    assert "\x1b" not in html and "\x07" not in html and "\u202e" not in html
    assert "document.title='pwned'" in tags.text  # shown, as the text that it is
    assert html.count("<svg") == len(re.findall(r'<svg (?:class="key" )?viewBox="[\d. ]+">', html))
    html.encode()


def test_a_run_that_has_not_trained_has_a_report(tmp_path: Path) -> None:
    write(tmp_path, [run_event()])
    text = Tags(report_html(read(tmp_path))).text
    assert "The run has not trained yet." in text and "No group was dropped." in text
