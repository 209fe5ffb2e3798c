import threading

import pytest
import torch

from penstock.models.transfer import one_ahead, side_stream


def test_on_a_cpu_there_is_nothing_to_it() -> None:
    with side_stream(torch.device("cpu")):
        value = torch.ones(3) * 2
    assert value.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_what_is_queued_inside_is_done_at_the_end() -> None:
    device = torch.device("cuda")
    outside = torch.cuda.current_stream(device)
    with side_stream(device):
        assert torch.cuda.current_stream(device) != outside
        value = torch.ones(1 << 20, pin_memory=True).to(device, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
    assert done.query()
    assert bool((value == 1).all())


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
