import threading

import pytest

from penstock.sync.look_ahead import one_ahead


def test_the_next_call_is_under_way_while_a_result_is_used() -> None:
    started = [threading.Event() for _ in range(3)]

    def call(number: int) -> int:
        started[number].set()
        return number * 10

    results = one_ahead(call, range(3))
    assert next(results) == 0
    assert started[1].wait(10)
    assert not started[2].is_set()
    assert list(results) == [10, 20]
    assert list(one_ahead(call, [])) == []


def test_an_error_comes_in_its_turn() -> None:
    def call(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        return number

    results = one_ahead(call, range(3))
    assert next(results) == 0
    with pytest.raises(ValueError, match="one"):
        next(results)
