"""A report is one file that holds the page, its answers, and nothing that runs but the page's own script."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.made_run import write_made_run
from penstock.observe.events import ConfigEvent, LogLine, TokenTexts
from penstock.observe.reading.run_reading import RunReading
from penstock.page import report_page
from penstock.page.page_files import page_files
from penstock.page.report_page import answers_of, bundle, report_html, write_report
from tests.observe.examples import TOKENS, TURNS, drop, phase, run_event, step
from tests.observe.hostile import HOSTILE
from tests.observe.store.written import read, sample, write


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, list[str]] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.content.setdefault(self.found[-1][0] if self.found else "", []).append(data)

    @property
    def answers(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content["script"][0])
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunReading:
    run = RunReading(write_made_run(tmp_path_factory.mktemp("runs") / "made", steps=120))
    run.refresh()
    return run


def test_it_is_one_file_that_asks_for_nothing(made: RunReading) -> None:
    html = write_report(made).read_text()
    tags = Tags(html)
    names = [name for name, _ in tags.found]
    assert not set(names) & {"img", "link", "iframe", "object", "form", "base"}
    assert names.count("script") == 2 and names.count("style") == 1
    assert not {
        name for _, some in tags.found for name in some if name.startswith("on") or name in ("src", "style")
    }
    assert (made.folder / "report.html").stat().st_mode & 0o777 == 0o600


def test_only_the_pages_own_script_and_style_may_run(made: RunReading) -> None:
    html = report_html(made)
    script = html[html.rindex("<script>") + 8 : html.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'sha256-" in html
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in html


def test_every_module_of_the_page_is_in_the_bundle_after_those_that_it_imports() -> None:
    script = bundle("/main.js")
    order = re.findall(r'^modules\["(.*?)"\] = ', script, re.MULTILINE)
    assert sorted(order) == sorted(
        path for path in page_files() if path.endswith(".js") and "vendor" not in path
    )
    for path in order:
        needs = re.findall(
            r'= modules\["(.*?)"\];$', script.split(f'modules["{path}"] = ')[1].split("\n})();")[0], re.M
        )
        assert all(order.index(need) < order.index(path) for need in needs)
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_a_long_run_is_thinned(made: RunReading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "MAX_SAMPLES", 40)
    monkeypatch.setattr(report_page, "MAX_TOKENS", 1000)
    answers = answers_of(made)
    rows = {one["row"] for one in answers["samples"]["rows"]}
    chosen = {one["row"] for _, some in answers["findings"]["answers"] for one in some}
    assert 40 <= len(rows) < 60 and chosen | set(answers["tokens"]) <= rows
    assert answers["samples"]["kept"] == len(made.samples) > 60
    widest = answers["findings"]["widest"]["row"]
    sizes = [len(trace["ids"]) for one in answers["tokens"].values() for trace in one["traces"]]
    assert next(iter(answers["tokens"])) == widest and 0 < sum(sizes) <= 1000
    whole = [
        one for one in answers["samples"]["rows"] if one["group"] == answers["samples"]["rows"][0]["group"]
    ]
    assert len(whole) == len(made.samples.select(group=whole[0]["group"]))


def test_the_answers_are_what_the_page_would_be_told(made: RunReading) -> None:
    answers = Tags(report_html(made)).answers
    assert answers["now"]["status"]["step"] == answers["last"] == 120
    assert set(answers["curves"]) == {"step", "time", "tokens"}
    assert len(answers["curves"]["step"]["reward"][0]) == 120
    assert answers["time"]["processes"] and answers["ages"]["bars"] and answers["drops"]["rows"]
    assert answers["timeline"]["spans"] and answers["config"]["config"]["run"]["name"] == "made"


def test_turns_are_in_the_report_shortened_together(tmp_path: Path) -> None:
    long = tuple(msgspec.structs.replace(one, text=one.text + "x" * 9000) for one in TURNS[2:])
    write(tmp_path, [run_event(), sample(1, turns=(*TURNS[:2], *long))])
    (shown,) = answers_of(read(tmp_path))["samples"]["rows"]
    texts = [part["text"] for part in shown["transcript"]]
    assert texts[:2] == [one.text for one in TURNS[:2]]
    assert sum(map(len, texts)) <= report_page.MAX_TEXT + 10 and texts[3].startswith("84<|end|>xx")


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
    plain = report_html(read_empty(tmp_path / "plain"))
    assert [name for name, _ in Tags(html).found] == [name for name, _ in Tags(plain).found]
    data = html[html.index('id="answers">') + 13 : html.rindex("<script>") - len("</script>")]
    assert "<" not in data and "\x1b" not in html and "\x07" not in html
    assert HOSTILE[0] in [one["answer"] for one in json.loads(data)["samples"]["rows"]]
    html.encode()


def read_empty(folder: Path) -> RunReading:
    write(folder, [run_event()])
    return read(folder)


def test_a_run_that_has_not_trained_has_a_report(tmp_path: Path) -> None:
    answers = Tags(report_html(read_empty(tmp_path))).answers
    assert answers["time"]["processes"] == answers["samples"]["rows"] == answers["drops"]["rows"] == []
    assert answers["tokens"] == {} and answers["last"] == 0
