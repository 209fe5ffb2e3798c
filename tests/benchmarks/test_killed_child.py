"""A life notes what it hears, and ends at the first word of an engine after its time."""

import json
from pathlib import Path

from benchmarks.killed_child import Note
from penstock.durability.kept_checkpoints import FOLDER, PROGRESS
from penstock.observe.events import Counters, PhaseEvent
from penstock.observe.run_state import RunState


def test_it_is_killed_when_it_trains_has_a_checkpoint_and_its_time_is_over(tmp_path: Path) -> None:
    state, clock, kills = RunState(), [100.0], list[float]()
    note = Note(
        state,
        tmp_path / "note.json",
        5.0,
        now=lambda: clock[0],
        kill=lambda: kills.append(clock[0]),
    )

    def at(now: float, tokens: int) -> None:
        clock[0] = now
        event = Counters(process="engine0", time=now, values={"tokens": float(tokens), "busy_s": now})
        state.on(event)
        note.on(event)

    at(101, 0)
    assert not (tmp_path / "note.json").exists()
    note.on(PhaseEvent(process="controller", time=102.0, phase="training"))
    at(103, 50)
    at(120, 80)
    assert kills == []  # there is nothing to go on from yet
    checkpoint = tmp_path / FOLDER / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / PROGRESS).touch()
    at(121, 90)
    assert kills == [121]
    assert json.loads((tmp_path / "note.json").read_text()) == {"training_at": 101, "tokens": 90.0}
