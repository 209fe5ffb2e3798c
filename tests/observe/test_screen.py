import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.observe.screen import Screen, lines, sparkline
from penstock.observe.status import AgeStatus, ExpertStatus, ProcessStatus, RunStatus, SampleStatus
from tests.observe.examples import STATUS, HandClock


def drawn(status: RunStatus, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(Screen(status))
    return out.getvalue().splitlines()


def test_80_columns_hold_every_line_whole() -> None:
    assert drawn(STATUS, 80) == [
        "penstock · demo · training            step 3/10   12 s, about 1 min 15 s to go",
        "reward     0.250  ▁▅█   held-out 0.300 → 0.500   0.000 at first",
        "answers    14 tokens, longest 32   2% cut off   1,234 tok/s",
        "staleness  mean 1.50, bound 4   ages 1 ▅ 2–3 ▅   max 3 so far",
        "limit      engines: trainer waits for groups 49% of the time",
        "flow       64 generating > 10 scoring > 38 ready > step 4   at most 80 groups",
        "dropped    2 score_error",
        "trainer    ███·········  25%  waiting for groups: 5 of 8 groups ready, 3 running",
        "engine0    ████████████ 100%  24 running, 0 waiting",
        "last       reward 1, versions 1–2: What is 12 × 7 = → 84",
    ]


def test_the_time_runs_on_between_two_updates() -> None:
    clock, out = HandClock(100.0), io.StringIO()
    screen = Screen(STATUS, clock.time)
    clock.now = 107.0
    Console(file=out, width=80, force_terminal=False).print(screen)
    assert "step 3/10   19 s, about 1 min 15 s to go" in out.getvalue()


def test_experts_have_a_line_where_they_are_recorded() -> None:
    experts = ExpertStatus(replayed=1.0, flipped=0.0214, gap=0.03012, gap_without=0.03124)
    shown = drawn(dataclasses.replace(STATUS, experts=experts), 90)
    assert shown[4] == ("experts    100% replayed, 2.1% flipped   logprob gap 0.0301, without replay 0.0312")


def test_what_a_users_loss_reports_has_a_line() -> None:
    shown = drawn(dataclasses.replace(STATUS, own_metrics={"my_weight": 0.93125, "my_gate": 12.0}), 80)
    assert shown[4] == "loss       my_weight 0.9313   my_gate 12"


def test_checkpoints_that_can_not_be_written_have_a_line_for_as_long() -> None:
    shown = drawn(dataclasses.replace(STATUS, failed_checkpoints=(3, 60, "No space left on device")), 100)
    assert (
        shown[7]
        == "unsaved    3 checkpoints could not be written, the last of step 60: No space left on device"
    )


def test_experts_of_which_none_was_replayed_are_not_said_to_agree() -> None:
    experts = ExpertStatus(replayed=0.0, flipped=None, gap=None, gap_without=None)
    shown = drawn(dataclasses.replace(STATUS, experts=experts), 90)
    assert shown[4] == "experts    0% replayed, – flipped   logprob gap –, without replay –"


BIG = dataclasses.replace(
    STATUS,
    name="a-long-name-" * 9,
    phase="starting: loading the model",
    elapsed_s=360_000.0,
    left_s=7_200_000.0,
    step=1_234_567,
    steps=9_999_999,
    reward=-12345.678,
    rewards=tuple(range(200)),
    first_reward=-98765.4321,
    heldout=tuple((step, 12345.678) for step in range(50)),
    tokens_per_s=1_234_567.0,
    ages=tuple(AgeStatus(first=2**n, last=2 ** (n + 1) - 1, share=1 / 12) for n in range(12)),
    drops={f"reason_{i}": 12345 for i in range(9)},
    processes=tuple(ProcessStatus(name=f"engine{i}", busy=0.5, doing="word " * 99) for i in range(64)),
    last_sample=SampleStatus(
        reward=1.0,
        prompt="\x1b[2J" + "宽" * 999,
        text="宽" * 999 + "\x1b[2J\n",
        oldest_version=1,
        newest_version=2,
    ),
)


@pytest.mark.parametrize("width", [30, 80, 120, 200])
def test_no_line_wraps_however_large_the_figures_are(width: int) -> None:
    shown = drawn(BIG, width)
    assert len(shown) == len(lines(BIG, width))
    assert max(map(cell_len, shown)) <= width
    assert "\x1b" not in "".join(shown)
    assert shown[-2].strip() == "and 55 more"
    assert shown[-1].rstrip().endswith("…")


@pytest.mark.parametrize("width", [80, 120])
def test_a_fact_that_does_not_fit_is_left_out_whole(width: int) -> None:
    reward = drawn(BIG, width)[1]
    assert "…" not in reward
    assert "held-out 12345.678 → 12345.678" in reward
    assert reward.endswith("-98765.432 at first") == (width == 120)


def test_a_run_that_starts_has_one_line() -> None:
    status = RunStatus(name="demo", steps=200, phase="starting: loading the model")
    (line,) = drawn(status, 80)
    assert line.split("   ", 1)[0] == "penstock · demo · starting: loading the model"
    assert line.endswith("step 0/200   0 s")


@pytest.mark.parametrize("status", [BIG, RunStatus(name="demo", steps=200, phase="starting")])
def test_an_echoed_interrupt_wraps_nothing(status: RunStatus) -> None:
    assert cell_len(drawn(status, 80)[-1] + "^C") <= 80


def test_a_sparkline_spans_zero_to_one() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline(()) == ""
    assert len(sparkline((0.1,) * 100)) == 60
