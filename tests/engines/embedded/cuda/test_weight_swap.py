import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda import weight_swap as gates  # isort: skip
from penstock.engines.embedded.cuda.weight_swap import Gate  # isort: skip
from penstock.engines.embedded.cuda.kernels.step_end import GAVE_UP  # isort: skip
from penstock.errors import PenstockError  # isort: skip

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="without a GPU nothing is queued")


def opened():
    return Gate(torch.device(DEVICE), {"policy": 4, "other": 2})


def test_the_newest_tokens_are_of_the_version_that_drew_them():
    gate = opened()
    assert (gate.newest("policy"), gate.newest("other")) == (4, 2)
    swapped = gate.let_in(lambda: lambda: 0.25, "policy", 7, is_busy=False)
    assert gate.versions.tolist() == [7, 2]
    assert gate.newest("policy") == 4  # nothing has been drawn with them
    assert swapped.verify_s == 0.25
    assert swapped.stall_s > 0
    gate.drew()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert (gate.newest("policy"), gate.newest("other")) == (7, 2)


def test_what_follows_a_stop_without_new_weights_is_never_handed_out():
    gate = opened()
    gate.raise_if_given_up()
    gate.device_report[GAVE_UP] = 3
    with pytest.raises(PenstockError, match="stood still for 20 s while new weights were copied"):
        gate.raise_if_given_up()


@on_gpu
def test_what_is_queued_goes_on_with_the_new_weights():
    gate, weight = opened(), torch.zeros(1, device=DEVICE)
    seen = torch.zeros(400, device=DEVICE)
    for step in range(400):
        torch.cuda._sleep(100_000)
        seen[step : step + 1].copy_(weight)
        gate.check()

    def receive():
        weight.fill_(1.0)
        return lambda: 0.0

    swapped = gate.let_in(receive, "policy", 5, is_busy=True)
    assert 0 < swapped.stall_s < 0.1
    torch.cuda.synchronize()
    values = seen.tolist()
    assert values == sorted(values)
    assert 0 < sum(values) < 400


@on_gpu
@pytest.mark.parametrize("when", ["receive", "verify"])
def test_a_failure_while_the_device_stands_still_lets_it_go_on(when):
    gate = opened()
    for _ in range(50):
        torch.cuda._sleep(1_000_000)
        gate.check()

    def fail():
        raise OSError("the bucket is gone")

    with pytest.raises(OSError, match="gone"):
        gate.let_in(fail if when == "receive" else lambda: fail, "policy", 5, is_busy=True)
    torch.cuda.synchronize()
    assert gate.let_in(lambda: lambda: 0.0, "policy", 6, is_busy=True).stall_s > 0


@on_gpu
def test_a_device_that_nobody_lets_go_on_gives_up(monkeypatch):
    monkeypatch.setattr(gates, "PATIENCE_NS", 10_000_000)
    gate = opened()
    gate._asked.fill_(99)
    gate.check(gates.PATIENCE_NS)
    torch.cuda.synchronize()
    with pytest.raises(PenstockError, match="gave up"):
        gate.raise_if_given_up()
