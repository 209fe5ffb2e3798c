"""A function decides which tasks come: easy ones first, hard ones when those are learnt."""

import msgspec
import pytest
from msgspec.structs import replace

from penstock.errors import UserError
from penstock.observe.events import LogLine, SampleEvent
from penstock.records import Task
from penstock.tasks.curriculum import NEWEST, Curriculum, kind_of, load_curriculum
from penstock.tasks.stream import StreamState, TaskStream

TASKS = [
    Task(id=f"{kind}{n}", prompt="p", columns={"kind": kind}) for n in range(4) for kind in ("easy", "hard")
]


def when_ready(task: Task, rewards: dict[str, float]) -> bool:
    return task.columns["kind"] == "easy" or rewards.get("easy", 0) > 0.5


def test_hard_tasks_come_when_easy_ones_are_learnt() -> None:
    curriculum = Curriculum(when_ready, TASKS)
    stream = TaskStream(TASKS, seed=3, curriculum=curriculum)
    assert {stream.next().columns["kind"] for _ in range(12)} == {"easy"}
    for _ in range(NEWEST):
        curriculum.observe("easy1", 0.0)
    for _ in range(NEWEST):
        curriculum.observe("easy1", 1.0)
    curriculum.observe("of another stream", 1.0)
    assert {stream.next().columns["kind"] for _ in range(12)} == {"easy", "hard"}


def test_a_task_that_is_passed_over_counts_as_taken_so_that_a_stream_can_go_on_elsewhere() -> None:
    stream = TaskStream(TASKS, shuffle=False, curriculum=Curriculum(when_ready, TASKS))
    assert [stream.next().id for _ in range(3)] == ["easy0", "easy1", "easy2"]
    assert stream.num_taken == 5
    again = TaskStream(TASKS, shuffle=False, curriculum=Curriculum(when_ready, TASKS))
    again.restore(stream.state())
    assert again.next().id == stream.next().id == "easy3"


def test_a_run_that_goes_on_knows_the_rewards_from_before() -> None:
    curriculum, later = Curriculum(when_ready, TASKS), Curriculum(when_ready, TASKS)
    stream = TaskStream(TASKS, seed=3, curriculum=curriculum)
    for _ in range(NEWEST + 3):
        curriculum.observe("easy1", 1.0)
    state = msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)
    TaskStream(TASKS, seed=3, curriculum=later).restore(state)
    assert later.rewards() == curriculum.rewards() == {"easy": (1.0,) * NEWEST}
    assert later.admits(TASKS[-1])


def test_where_nothing_is_admitted_something_comes_nevertheless() -> None:
    stream = TaskStream(TASKS, shuffle=False, curriculum=Curriculum(lambda task, rewards: False, TASKS))
    assert [stream.next().id for _ in range(2)] == ["hard3", "hard3"]


def test_a_function_that_raises_is_named_with_its_task() -> None:
    stream = TaskStream(TASKS, shuffle=False, curriculum=Curriculum(lambda task, rewards: 1 / 0 > 1, TASKS))
    with pytest.raises(UserError, match="tasks.curriculum raised ZeroDivisionError on task 'easy0'"):
        stream.next()


def test_kinds_are_gym_datasets_or_a_column() -> None:
    assert kind_of(Task(id="a", prompt="p", columns={"reasoning_gym": {"name": "chain_sum"}})) == "chain_sum"
    assert [kind_of(TASKS[1]), kind_of(Task(id="b", prompt="p"))] == ["hard", ""]
    assert load_curriculum(None, TASKS) is None
    assert load_curriculum("tests.tasks.test_curriculum:when_ready", TASKS) is not None


SAMPLE = SampleEvent(
    process="controller",
    time=0.0,
    group=0,
    episode=0,
    task_id="t",
    step=1,
    reward=0.5,
    num_turns=1,
    num_prompt_tokens=1,
    num_output_tokens=1,
    finish_reason="stop",
    prompt="",
    answer="",
)


def test_only_answers_that_were_trained_count() -> None:
    seen: list[dict[str, float]] = []
    task = Task(id="t", prompt="p", columns={"kind": "easy"})
    curriculum = Curriculum(lambda task, rewards: not seen.append(dict(rewards)), [task])
    for event in (
        SAMPLE,
        replace(SAMPLE, reward=1.0),
        replace(SAMPLE, step=None, drop="failed_episodes", reward=9.0),
        replace(SAMPLE, reward=None),
        LogLine(process="controller", time=0.0, line="hi"),
    ):
        curriculum.on(event)
    assert curriculum.admits(task)
    assert seen == [{"easy": 0.75}]
    curriculum.close()
