from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.least_loaded import LeastLoaded
from penstock.engines.rolling_update import Member


def members(count: int) -> list[Member]:
    return [Member(f"engine{number}", None) for number in range(count)]  # type: ignore[arg-type]


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_it_finds_what_a_look_at_all_would_find(count: int, moves: list[tuple[bool, int]]) -> None:
    engines = members(count)
    least = LeastLoaded(lambda member: not member.is_lost)
    least.renew(engines)
    for begins, number in moves:
        found = least.find()
        assert found is not None
        assert found.load == min(engine.load for engine in engines)
        if begins:
            found.load += 1
        elif engines[number % count].load:
            engines[number % count].load -= 1
            least.note(engines[number % count])


def test_those_that_leave_or_drain_come_last_and_lost_ones_never() -> None:
    one, two, three = engines = members(3)
    least = LeastLoaded(lambda member: not member.is_lost)
    least.renew(engines)
    one.is_leaving, two.is_draining, three.load = True, True, 5
    assert least.find() is three
    three.is_lost = True
    assert least.find() is two
    two.is_lost = one.is_lost = True
    assert least.find() is None
    three.is_lost = False
    least.renew(engines)
    assert least.find() is three


def test_old_entries_do_not_pile_up() -> None:
    engines = members(2)
    least = LeastLoaded(lambda member: True)
    least.renew(engines)
    for _ in range(1000):
        engines[0].load += 1
        engines[0].load -= 1
        least.note(engines[0])
    assert len(least._heap) < 100
