import numpy as np

from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.engines.embedded.waves import WaveLine
from penstock.types import GenerateRequest, SamplingParams, Wave


def seq(name: str, arrival: int, *, wave: tuple[str, int] | None = None, priority: int = 0) -> Sequence:
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
    line, one = WaveLine(), seq("a", 1)
    assert line.arrive(one) == [one]
    assert line.left(one) == []


def test_a_wave_begins_when_all_of_it_is_there_in_an_order_of_its_own() -> None:
    line = WaveLine()
    late, early, tenth = (seq(f"g1.{n}.0", a, wave=("g1", 3)) for n, a in ((2, 5), (0, 6), (10, 4)))
    assert line.arrive(late) == line.arrive(early) == []
    assert names(line.arrive(tenth)) == ["g1.0.0", "g1.2.0", "g1.10.0"]
    assert [early.arrival, late.arrival, tenth.arrival] == [4, 5, 6]


def test_the_next_wave_waits_until_the_one_before_has_left() -> None:
    line = WaveLine()
    first = [seq(f"g3.{n}.0", n, wave=("g3", 2), priority=3) for n in range(2)]
    others = [seq(f"g{n}.0.0", n, wave=(f"g{n}", 1), priority=n) for n in (5, 4)]
    assert names([each for one in first for each in line.arrive(one)]) == ["g3.0.0", "g3.1.0"]
    assert [line.arrive(one) for one in others] == [[], []]
    assert line.left(first[0]) == []
    assert names(line.left(first[1])) == ["g4.0.0"]
    assert names(line.left(others[1])) == ["g5.0.0"]


def test_one_that_is_cancelled_before_it_begins_is_gone() -> None:
    line = WaveLine()
    running = seq("g1.0.0", 1, wave=("g1", 1))
    waiting = [seq(f"g2.{n}.0", n, wave=("g2", 2), priority=2) for n in (2, 3)]
    gathering = seq("g3.0.0", 4, wave=("g3", 2), priority=3)
    line.arrive(running)
    for one in (*waiting, gathering):
        assert line.arrive(one) == []
    assert line.left(waiting[0]) == line.left(gathering) == []
    assert names(line.left(running)) == ["g2.3.0"]
    assert line.left(waiting[1]) == []
