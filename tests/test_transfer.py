import pytest
import torch

from penstock.transfer import side_stream


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
