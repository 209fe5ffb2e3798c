"""The order of tasks: deterministic, fair over passes, and resumable at any point."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TaskError
from penstock.records import Task
from penstock.tasks.stream import StreamState, TaskStream


def some_tasks(count: int) -> list[Task]:
    return [Task(id=str(number), prompt=f"p{number}") for number in range(count)]


def take(stream: TaskStream, count: int) -> list[str]:
    return [stream.next().id for _ in range(count)]


def test_without_shuffling_the_order_is_the_sources() -> None:
    stream = TaskStream(some_tasks(3), shuffle=False)
    assert take(stream, 7) == ["0", "1", "2", "0", "1", "2", "0"]
    assert stream.epoch == 2


def test_every_pass_holds_every_task_once_in_an_order_of_its_own() -> None:
    stream = TaskStream(some_tasks(20), seed=1)
    passes = [take(stream, 20) for _ in range(3)]
    assert all(sorted(one, key=int) == [str(number) for number in range(20)] for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_seed_alone_decides_the_order() -> None:
    assert take(TaskStream(some_tasks(20), seed=5), 50) == take(TaskStream(some_tasks(20), seed=5), 50)
    assert take(TaskStream(some_tasks(20), seed=5), 20) != take(TaskStream(some_tasks(20), seed=6), 20)


def test_tasks_put_back_come_first_in_the_order_of_their_return() -> None:
    stream = TaskStream(some_tasks(5), shuffle=False)
    first, second = stream.next(), stream.next()
    stream.put_back(second)
    stream.put_back(first)
    assert take(stream, 4) == ["1", "0", "2", "3"]


def test_a_foreign_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task 'x' is not of this stream"):
        TaskStream(some_tasks(2)).put_back(Task(id="x", prompt="p"))


def test_no_tasks_are_refused() -> None:
    with pytest.raises(TaskError, match="there must be at least one task, got none"):
        TaskStream([])


@given(
    count=st.integers(1, 8),
    moves=st.lists(st.booleans(), max_size=40),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_a_restored_stream_goes_on_as_the_original_would(
    count: int, moves: list[bool], seed: int, shuffle: bool
) -> None:
    tasks = some_tasks(count)
    stream = TaskStream(tasks, seed=seed, shuffle=shuffle)
    out: list[Task] = []
    for take_one in moves:
        if take_one or not out:
            out.append(stream.next())
        else:
            stream.put_back(out.pop(0))
    saved = msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)
    again = TaskStream(tasks, seed=seed, shuffle=shuffle)
    again.restore(saved)
    assert take(again, 20) == take(stream, 20)


def test_a_state_of_other_tasks_is_refused() -> None:
    state = TaskStream(some_tasks(3)).state()
    with pytest.raises(TaskError, match="belongs to other tasks"):
        TaskStream(some_tasks(4)).restore(state)
