import dataclasses
import io

import pytest
from rich.console import Console

from penstock.observe.status import ProcessStatus, RunStatus
from penstock.observe.terminal import TerminalView, draw, sparkline
from penstock.observe.views import Log, PlainView, SilentView, progress_line

STATUS = RunStatus(
    name="demo",
    phase="training",
    elapsed_s=12.0,
    step=3,
    steps=10,
    reward=0.25,
    rewards=(0.0, 0.5, 1.0),
    heldout=((0, 0.3),),
    tokens_per_s=1234.5,
    staleness_mean=1.5,
    staleness_max=3,
    samples=192,
    drops={"score_error": 2},
    processes=(
        ProcessStatus(name="trainer", busy=0.25, doing="waiting for groups: 5 of 8 groups ready, 3 running"),
        ProcessStatus(name="engine0", busy=1.0, doing="24 running, 0 waiting"),
    ),
)


def test_a_progress_line_says_who_waits_for_what() -> None:
    assert progress_line(STATUS) == (
        "step 3/10  reward 0.250  1,234 tok/s  staleness 1.50 (max 3)  "
        "trainer 25% (waiting for groups: 5 of 8 groups ready, 3 running); "
        "engine0 100% (24 running, 0 waiting)"
    )


def test_the_live_view_shows_reward_processes_and_drops() -> None:
    out = io.StringIO()
    Console(file=out, width=140, force_terminal=False).print(draw(STATUS))
    text = out.getvalue()
    for part in (
        "demo · training",
        "step 3/10",
        "reward 0.250",
        "held-out 0.300",
        "dropped groups: 2 score_error",
    ):
        assert part in text
    assert "trainer  ███·········  25%" in text


def test_a_sparkline_spans_zero_to_one() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline(()) == ""
    assert len(sparkline((0.1,) * 100)) == 60


def test_brackets_are_shown_and_not_taken_for_styles() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=False)
    TerminalView(console).log("late: [red] of penstock[gpu]")
    console.print(draw(dataclasses.replace(STATUS, name="run[b]")))
    assert "late: [red] of penstock[gpu]" in out.getvalue()
    assert "run[b] · training" in out.getvalue()


def test_a_line_of_others_is_shown_escaped_bounded_and_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    PlainView(1.0).log("–\x1b[2J" + "x" * 3_000_000)
    assert raw.getvalue()[8:18] == b" ?\\x1b[2Jx"
    assert len(raw.getvalue()) < 2200


def test_a_closed_output_costs_a_line_and_nothing_else() -> None:
    class Closed(SilentView):
        def log(self, line: str) -> None:
            raise BrokenPipeError

    Log(Closed())("a line")
