import dataclasses
import io

import pytest
from rich.console import Console

from penstock.observe.readers import show
from penstock.observe.screen import Screen
from penstock.observe.status import ExpertStatus, SampleStatus
from penstock.observe.terminal import TerminalView
from penstock.observe.views import PlainView, progress_line
from tests.observe.examples import STATUS, run_event


def test_a_progress_line_says_who_waits_for_what() -> None:
    assert progress_line(STATUS) == (
        "step 3/10  about 1 min 15 s to go  reward 0.250  1,234 tok/s  staleness 1.50 (max 3)  limit: engines  "
        "trainer 25% (waiting for groups: 5 of 8 groups ready, 3 running); "
        "engine0 100% (24 running, 0 waiting)"
    )


def test_a_progress_line_tells_of_experts_that_flipped() -> None:
    experts = ExpertStatus(replayed=1.0, flipped=0.021, gap=0.0, gap_without=0.0)
    assert "(max 3)  experts 2.1% flipped  limit: engines" in progress_line(
        dataclasses.replace(STATUS, experts=experts)
    )
    unknown = ExpertStatus(replayed=0.0, flipped=None, gap=None, gap_without=None)
    assert "  experts – flipped  " in progress_line(dataclasses.replace(STATUS, experts=unknown))


def test_a_progress_line_has_what_a_users_loss_reports() -> None:
    status = dataclasses.replace(STATUS, own_metrics={"my_weight": 0.93125})
    assert "(max 3)  my_weight 0.9313  limit: engines" in progress_line(status)


def test_brackets_are_shown_and_not_taken_for_styles() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=False)
    TerminalView(console).log("late: [red] of penstock[gpu]")
    console.print(Screen(dataclasses.replace(STATUS, name="run[b]")))
    assert "late: [red] of penstock[gpu]" in out.getvalue()
    assert "run[b] · training" in out.getvalue()


def test_the_live_view_shows_lines_and_samples_escaped_and_bounded() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=False)
    sample = SampleStatus(
        reward=1.0, text="\x1b]0;x\x07" + "y" * 3_000_000, oldest_version=1, newest_version=2
    )
    TerminalView(console).log("\x1b[2J" + "x" * 3_000_000)
    console.print(Screen(dataclasses.replace(STATUS, last_sample=sample)))
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert out.getvalue().startswith("\\x1b[2Jxxx")
    assert "\\x1b]0;x\\x07yyy" in out.getvalue()
    assert len(out.getvalue()) < 5000


def test_a_line_of_others_is_shown_escaped_bounded_and_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    PlainView(1.0).log("–\x1b[2J" + "x" * 3_000_000)
    assert raw.getvalue()[8:18] == b" ?\\x1b[2Jx"
    assert len(raw.getvalue()) < 2200


def test_the_plain_view_says_each_phase_once_and_progress_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = PlainView(5.0)
    show(view).stream.emit(run_event())
    for phase, elapsed_s in (("verifying", 1.0), ("verifying", 2.0), ("training", 3.0), ("training", 7.0)):
        view.update(dataclasses.replace(STATUS, phase=phase, elapsed_s=elapsed_s))
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "starting: reading tasks and tokenizer",
        "verifying",
        "training",
        progress_line(STATUS),
    ]
