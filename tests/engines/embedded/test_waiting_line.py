from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.engines.embedded.waiting_line import WaitingLine
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
    line.release_held()
    assert line.num_held == 0
    line.arrive(seq("later", 6))
    assert popped(line) == ["fresh", "begun", "other", "new", "another", "later"]


def test_one_that_is_held_can_be_removed() -> None:
    line = WaitingLine()
    line.arrive(one := seq("one", 1))
    line.hold(("policy",))
    line.remove(one)
    line.release_held()
    assert len(line) == 0
