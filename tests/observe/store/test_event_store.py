import random
from pathlib import Path

import msgspec
import pytest

from penstock.observe.events import CheckpointEvent, PhaseEvent, RunEvent, TurnText
from penstock.observe.store.event_store import budgets
from penstock.observe.store.segments import Texts
from tests.observe.examples import (
    ONE_OF_EACH,
    STALENESS,
    TOKENS,
    TURNS,
    counters,
    drop,
    phase,
    run_event,
    step,
)
from tests.observe.store.written import begin, read, sample, write


def test_every_kind_of_event_is_kept(tmp_path: Path) -> None:
    write(tmp_path, ONE_OF_EACH)
    run = read(tmp_path)
    assert (len(run.steps), len(run.drops), len(run.updates), len(run.evaluations)) == (1, 1, 1, 1)
    assert (len(run.recoveries), [line.line for line in run.lines]) == (1, ["a line"])
    assert run.config == {"run": {"seed": 3}} and run.num_gpus == 2
    assert run.spans()[0].attributes == {"step": 1}
    assert run.counters("engine0")["tokens"].values.tolist() == [5.0]
    assert run.samples.read(0).answer == "84"
    assert run.tokens(2, 3, 1)[0].token_ids.tolist() == [7, 8, 9, 7]
    assert [bar.tokens for bar in run.staleness.histogram()] == [0, 10, 6]


@pytest.mark.parametrize("event", [step(1, 104.0), drop("stale", 104.0), phase("training", 104.0)], ids=str)
def test_what_matters_is_in_the_files_when_it_is_told(tmp_path: Path, event: PhaseEvent) -> None:
    write(tmp_path, [run_event(), sample(1), event], close=False)
    run = read(tmp_path)
    assert len(run.samples) == 1
    assert run.now == 4.0


def test_a_drop_stays_whatever_becomes_of_its_texts(tmp_path: Path) -> None:
    noise = random.Random(0)
    events = [run_event()]
    for group in range(400):
        text = f"{noise.getrandbits(4000):x}"
        events += [
            sample(group, step=None, drop="stale", prompt=text, answer=text),
            drop("stale", 105.0, group=group),
        ]
    write(tmp_path, events, budget=budgets(samples_mb=0.1, tokens_mb=0, spans_mb=0))
    run = read(tmp_path)
    assert [one.group for one in run.drops] == list(range(400))
    assert run.state.drops == {"stale": 400}
    kept = run.samples.columns["group"].tolist()
    assert kept == sorted(set(kept)) and 50 < len(kept) < 400
    assert kept[-40:] == list(range(360, 400))
    assert run.samples.read(len(kept) - 1).answer == text
    assert not all(run.samples.read(row).text_kept for row in range(len(kept)))
    size = sum(path.stat().st_size for path in (tmp_path / "events").glob("[st]*.seg"))
    assert size <= 100_000


def test_no_budget_keeps_facts_alone(tmp_path: Path) -> None:
    write(tmp_path, ONE_OF_EACH, budget=budgets(samples_mb=0, tokens_mb=0, spans_mb=0))
    assert {path.name for path in (tmp_path / "events").iterdir()} == {"facts-000000.seg"}
    assert len(read(tmp_path).drops) == 1


def test_a_heartbeat_is_not_kept_but_brings_what_waits(tmp_path: Path) -> None:
    write(tmp_path, [run_event(), sample(1), counters("controller", 105.0)], close=False)
    run = read(tmp_path)
    assert len(run.samples) == 1
    assert run.counters("controller") == {}


def test_a_session_begins_files_of_its_own_on_one_clock(tmp_path: Path) -> None:
    """The second machine has been up for seconds only, and its clock begins anew."""
    write(tmp_path, [begin(1000.0, time=5000.0), step(1, 5010.0), step(2, 5020.0)])
    write(tmp_path, [begin(1100.0, time=3.0), step(2, 13.0, reward=0.75)])
    run = read(tmp_path)
    assert run.steps.times.tolist() == [10.0, 110.0]
    assert run.steps.column("reward").tolist() == [0.5, 0.75]
    assert [session.began for session in run.sessions] == [0.0, 100.0]
    assert run.steps.num_undone == 1


def test_texts_of_a_group_share_their_prompt(tmp_path: Path) -> None:
    events = [
        run_event(),
        *(sample(group // 8, prompt=f"p{group // 8}", answer=f"a{group}") for group in range(200)),
    ]
    write(tmp_path, events)
    run = read(tmp_path)
    for row in (0, 7, 8, 63, 64, 65, 127, 128, 199):
        assert (run.samples.read(row).prompt, run.samples.read(row).answer) == (f"p{row // 8}", f"a{row}")


def test_turns_are_kept_beside_the_texts(tmp_path: Path) -> None:
    odd = (TurnText(turn=0, role="model", text="half \ud800"),)
    write(tmp_path, [run_event(), sample(1, turns=TURNS), sample(2), sample(3, turns=odd)])
    samples = read(tmp_path).samples
    assert [samples.read(row).turns[:9] for row in (0, 1)] == [TURNS, ()]
    assert samples.read(2).turns[0].text == "half \\ud800"
    assert samples.head(0).turns == ()


def test_texts_of_runs_before_turns_were_kept_are_read() -> None:
    assert msgspec.convert(["Texts", "p", "a", ""], Texts).turns == ()


def test_steps_of_other_columns_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, [run_event(), step(1, 101.0), drop("stale", 101.5), step(2, 102.0), step(3, 103.0)])
    run = read(tmp_path)
    assert run.steps.column("dropped_stale").tolist()[1:] == [1.0, 1.0]
    assert str(run.steps.column("dropped_stale")[0]) == "nan"
    assert run.steps.row(2)["time_s"] == 3.0


def test_events_before_a_run_is_known_have_the_wall_clock(tmp_path: Path) -> None:
    done = CheckpointEvent(process="controller", time=7.0, step=1, write_s=0.5, num_bytes=64)
    write(tmp_path, [done, STALENESS, TOKENS])
    assert read(tmp_path).now == 97.0
    assert isinstance(begin(5.0), RunEvent)
