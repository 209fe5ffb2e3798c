"""Counts, drops and one group's life, in 80 columns and with others' text escaped."""

import asyncio
import io
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock.buffer.admission import Ticket
from penstock.buffer.durable_log import FOLDER, open_log
from penstock.cli.inspect import _decoder_of, print_run
from penstock.errors import UserError
from penstock.orchestration.virtual_time import run_in_virtual_time
from penstock.types import Episode, ScoredGroup, Task
from tests.buffer.test_admission import scored
from tests.types.test_partial_work import part


def answered(number: int, text: str) -> ScoredGroup:
    group = scored(number, [4, 5])
    episode = group.group.episodes[0]
    turn = msgspec.structs.replace(episode.turns[0], text=text)
    episode = msgspec.structs.replace(episode, turns=(turn,))
    return msgspec.structs.replace(group, group=msgspec.structs.replace(group.group, episodes=(episode,)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    async def scene() -> None:
        async with open_log(tmp_path / FOLDER) as log:
            for number in range(4):
                ticket = Ticket(number=number, bound=2, deadline=2)
                await log.admitted(ticket, Task(id=f"t{number}", prompt="what is\n1+1?"), number + 1)
                if number < 3:
                    await log.finished(ticket, answered(number, "it is \x1b[31m2" + "!" * 90))
            await log.trained(7, [0])
            await log.resumed(6)
            await log.trained(7, [0])
            await log.dropped(2, "stale")

    asyncio.run(scene())
    return tmp_path


def shown(run: Path, group: int | None = None) -> str:
    output = io.StringIO()
    console = Console(file=output, width=80)
    print_run(str(run), group=group, console=console, decode=lambda tokens: f"<{tokens}>")
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_counts_by_state_the_oldest_and_drops_by_reason(run: Path) -> None:
    text = shown(run)
    assert "4 groups" in text
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["issued: admitted, and nothing of them is written yet", "1", "3 (task t3)"],
        ["scored: waiting for their step", "1", "1 (task t1)"],
        ["trained: in the weights", "1", "0 (task t0)"],
        ["dropped: left without being trained", "1", "2 (task t2)"],
    ]
    assert "       1  stale" in text


def test_the_whole_life_of_a_group_with_its_text(run: Path) -> None:
    lines = [line.strip() for line in shown(run, group=0).splitlines()]
    assert lines[:6] == [
        "group 0",
        "admitted: task t0, at most 2 updates old",
        "what is",
        "1+1?",
        "finished and scored: 1 episodes",
        "episode 0 · 2 tokens · version 4–5 · reward 1",
    ]
    assert lines[6] == "it is"
    assert lines[7].startswith("\\x1b[31m2!!!")
    assert lines[-3:] == [
        "trained in step 7",
        "waits again: the run went back to step 6",
        "trained in step 7",
    ]
    assert "dropped: stale; its task goes back" in shown(run, group=2)


def test_what_selection_made_of_a_group_is_shown(tmp_path: Path) -> None:
    """An episode that it left out of the loss, and the step for which the group was taken."""
    group = answered(0, "2")
    masked = tuple(
        tuple(one.in_loss_where(one.loss_mask & False) for one in group.samples(0)) for _ in range(1)
    )

    async def scene() -> None:
        async with open_log(tmp_path / FOLDER) as log:
            ticket = Ticket(number=0, bound=2, deadline=2)
            await log.admitted(ticket, Task(id="t0", prompt="1+1?"), 1)
            await log.finished(ticket, group, masked)
            log.selected(6, [0])

    asyncio.run(scene())
    text = " ".join(shown(tmp_path, group=0).split())
    assert "reward 1 · left out of the loss by selection 2" in text
    assert text.endswith("taken for a step by the weights of step 6")


def test_tokens_whose_tokenizer_is_not_there_have_no_text(tmp_path: Path) -> None:
    assert _decoder_of(tmp_path)([1, 2]) == "(its tokenizer can't be loaded)"


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the journal has no group 9: it was never admitted, or a checkpoint"):
        shown(run, group=9)
    with pytest.raises(UserError, match="has no journal: a run keeps one when it has checkpoints"):
        shown(tmp_path / FOLDER)


def test_a_ledger_that_is_missing_broken_or_behind_is_not_asked(run: Path) -> None:
    ledger, whole = run / FOLDER / "ledger.sqlite", shown(run)
    with sqlite3.connect(ledger) as database:
        database.execute("UPDATE applied SET sequence = sequence - 1")
        database.execute("DELETE FROM attempts WHERE number = 3")
    database.close()
    assert shown(run) == whole
    ledger.write_bytes(b"no database" * 99)
    assert shown(run) == whole
    ledger.unlink()
    assert shown(run) == whole


def test_what_is_under_way_is_told_in_tokens(tmp_path: Path) -> None:
    async def inline(write: Callable[[], None]) -> None:
        write()

    async def scene() -> None:
        async with open_log(tmp_path / FOLDER, progress_s=2, in_thread=inline) as log:
            await log.admitted(Ticket(number=3, bound=2, deadline=2), Task(id="t3", prompt="1+1?"), 1)
            log.work.turn(part(0, 7, 8))
            log.work.turn(part(0, 5, episode=1))
            await asyncio.sleep(3)
            log.work.turn(part(2, 9))
            log.ended(3, Episode(task_id="t3", index=1, turns=()))
            await asyncio.sleep(3)

    run_in_virtual_time(scene())
    assert "running: being generated" in shown(tmp_path)
    lines = [line.strip() for line in shown(tmp_path, group=3).splitlines()]
    assert lines[-2:] == ["episode 0 is under way: 3 tokens kept, in turn 1", "<[7, 8, 9]>"]
    assert not any("episode 1 is under way" in line for line in lines)
