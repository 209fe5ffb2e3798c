import numpy as np

from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.engines.embedded.waiting_line import WaitingLine, WaveLine
from penstock.types import GenerateRequest, SamplingParams, Wave
from tests.engines.contract import ask


def seq(name: str, arrival: int, **options: object) -> Sequence:
    return sequence_of(ask(name, **options), arrival=arrival, max_context=64, seed=0)


def popped(line: WaitingLine) -> list[str]:
    return [line.pop().request.id for _ in range(len(line))]


def test_smaller_priorities_go_first_then_earlier_arrivals() -> None:
    line = WaitingLine()
    for number, priority in enumerate((1, 0, 1, 0)):
        line.arrive(seq(str(number), number, priority=priority))
    assert line.first.request.id == "1"
    assert popped(line) == ["1", "3", "0", "2"]


def test_those_that_have_not_begun_are_held_and_come_back_to_their_places() -> None:
    line = WaitingLine()
    begun, fresh, other = seq("begun", 2), seq("fresh", 1), seq("other", 3, policy="teacher")
    begun.tokens.append(7)
    for each in (begun, fresh, other):
        line.arrive(each)
    line.hold(("policy",))
    line.arrive(seq("new", 4))
    line.arrive(seq("another", 5, policy="teacher"))
    line.push(again := seq("again", 0))  # preempted before its first token: it is in flight
    assert (len(line), line.num_held) == (4, 2)
    line.remove(again)
    line.let_go()
    assert line.num_held == 0
    line.arrive(seq("later", 6))
    assert popped(line) == ["fresh", "begun", "other", "new", "another", "later"]


def test_one_that_is_held_can_be_removed() -> None:
    line = WaitingLine()
    line.arrive(one := seq("one", 1))
    line.hold(("policy",))
    line.remove(one)
    line.let_go()
    assert len(line) == 0


def member(name: str, arrival: int, *, wave: tuple[str, int] | None = None, priority: int = 0) -> Sequence:
    request = GenerateRequest(
        id=name,
        token_ids=np.array([1], np.int32),
        sampling=SamplingParams(max_tokens=4),
        priority=priority,
        wave=None if wave is None else Wave(name=wave[0], size=wave[1]),
    )
    return sequence_of(request, arrival=arrival, max_context=16, seed=0)


def names(sequences: list[Sequence]) -> list[str]:
    return [one.request.id for one in sequences]


def test_a_request_without_a_wave_begins_at_once() -> None:
    line, one = WaveLine(), member("a", 1)
    assert line.arrive(one) == [one]
    assert line.left(one) == []


def test_a_wave_begins_when_all_of_it_is_there_in_an_order_of_its_own() -> None:
    line = WaveLine()
    late, early, tenth = (member(f"g1.{n}.0", a, wave=("g1", 3)) for n, a in ((2, 5), (0, 6), (10, 4)))
    assert line.arrive(late) == line.arrive(early) == []
    assert names(line.arrive(tenth)) == ["g1.0.0", "g1.2.0", "g1.10.0"]
    assert [early.arrival, late.arrival, tenth.arrival] == [4, 5, 6]


def test_the_next_wave_waits_until_the_one_before_has_left() -> None:
    line = WaveLine()
    first = [member(f"g3.{n}.0", n, wave=("g3", 2), priority=3) for n in range(2)]
    others = [member(f"g{n}.0.0", n, wave=(f"g{n}", 1), priority=n) for n in (5, 4)]
    assert names([each for one in first for each in line.arrive(one)]) == ["g3.0.0", "g3.1.0"]
    assert [line.arrive(one) for one in others] == [[], []]
    assert line.left(first[0]) == []
    assert names(line.left(first[1])) == ["g4.0.0"]
    assert names(line.left(others[1])) == ["g5.0.0"]


def test_one_that_is_cancelled_before_it_begins_is_gone() -> None:
    line = WaveLine()
    running = member("g1.0.0", 1, wave=("g1", 1))
    waiting = [member(f"g2.{n}.0", n, wave=("g2", 2), priority=2) for n in (2, 3)]
    gathering = member("g3.0.0", 4, wave=("g3", 2), priority=3)
    line.arrive(running)
    for one in (*waiting, gathering):
        assert line.arrive(one) == []
    assert line.left(waiting[0]) == line.left(gathering) == []
    assert names(line.left(running)) == ["g2.3.0"]
    assert line.left(waiting[1]) == []
