"""One group's life and the attempts at a task, with others' text escaped."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.cli.group_story import _decoder_of, group_lines, task_lines
from penstock.durability.durable_log import FOLDER, open_log
from penstock.errors import UserError
from penstock.loop.attempt_records import (
    GroupDropped,
    GroupsSelected,
    GroupsTrained,
    RunResumed,
    scored_record,
)
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import ScoredGroup, WorkProgressed
from tests.loop.test_attempts import admitted, ended
from tests.records.builders import scored, with_turns
from tests.records.test_partial_work import part


def answered(number: int, text: str) -> ScoredGroup:
    return with_turns(scored(number, [4, 5]), lambda turn: msgspec.structs.replace(turn, text=text))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    async def scene() -> None:
        async with open_log(tmp_path / FOLDER) as log:
            for number in range(4):
                await log.append(msgspec.structs.replace(admitted(number), prompt="what is\n1+1?"))
                if number < 3:
                    text = "it is \x1b[31m2" + "!" * 90
                    await log.append(scored_record(number, answered(number, text), None))
            await log.append(GroupsTrained(step=7, numbers=(0,)))
            await log.append(RunResumed(step=6))
            await log.append(GroupsTrained(step=7, numbers=(0,)))
            await log.append(GroupDropped(number=2, reason="stale", returns="t2"))

    asyncio.run(scene())
    return tmp_path


def shown(run: Path, group: int = 0) -> str:
    return "\n".join(group_lines(str(run), group, decode=lambda tokens: f"<{tokens}>"))


def test_the_whole_life_of_a_group_with_its_text(run: Path) -> None:
    lines = [line.strip() for line in shown(run).splitlines()]
    assert lines[:7] == [
        "group 0",
        "admitted: task t0, at most 2 updates old",
        "what is",
        "1+1?",
        "scored: 1 episodes",
        "episode 0 · 2 tokens · version 4–5 · reward 1",
        "it is \\x1b[31m2" + "!" * 90,
    ]
    assert lines[-3:] == [
        "trained in step 7",
        "waits again: the run went back to step 6",
        "trained in step 7",
    ]
    assert "dropped: stale; its task goes back" in shown(run, group=2)


def test_the_attempts_at_a_task_are_told_with_what_became_of_each(run: Path) -> None:
    assert list(task_lines(str(run), "t0")) == ["group 0: trained in step 7"]
    assert list(task_lines(str(run), "t1")) == ["group 1: scored"]
    assert list(task_lines(str(run), "t2")) == ["group 2: dropped: stale"]
    with pytest.raises(UserError, match="the journal has no attempt at task 't9'"):
        list(task_lines(str(run), "t9"))


def test_what_selection_made_of_a_group_is_shown(tmp_path: Path) -> None:
    """An episode that it left out of the loss, and the step for which the group was taken."""
    group = answered(0, "2")
    masked = tuple(
        tuple(one.in_loss_where(one.loss_mask & False) for one in group.samples(0)) for _ in range(1)
    )

    async def scene() -> None:
        async with open_log(tmp_path / FOLDER) as log:
            await log.append(admitted(0))
            await log.append(scored_record(0, group, masked))
            log.append(GroupsSelected(step=6, numbers=(0,)))

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


def test_what_is_under_way_is_told_in_tokens(tmp_path: Path) -> None:
    async def inline(write: Callable[[], None]) -> None:
        write()

    async def scene() -> None:
        async with open_log(tmp_path / FOLDER, progress_s=2, in_thread=inline) as log:
            await log.append(admitted(3))
            log.append(WorkProgressed(turns=(part(0, 7, 8),)))
            log.append(WorkProgressed(turns=(part(0, 5, episode=1),)))
            await asyncio.sleep(3)
            log.append(WorkProgressed(turns=(part(2, 9),)))
            log.append(ended(3, 1))
            await asyncio.sleep(3)

    run_in_virtual_time(scene())
    lines = [line.strip() for line in shown(tmp_path, group=3).splitlines()]
    assert lines[-2:] == ["episode 0 is under way: 3 tokens kept, in turn 1", "<[7, 8, 9]>"]
    assert not any("episode 1 is under way" in line for line in lines)
