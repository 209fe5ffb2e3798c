import subprocess

import pytest
import torch

from penstock.errors import UserError
from penstock.models import precision


@pytest.fixture
def probed(monkeypatch):
    """Says how the probe ends, instead of running it; counts how often it was asked."""
    precision._matmul_works.cache_clear()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    asked = []

    def use(code):
        def run(command, **options):
            asked.append(command)
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setattr(subprocess, "run", run)
        return asked

    yield use
    precision._matmul_works.cache_clear()


def test_a_cpu_that_dies_of_a_product_is_spared_them(probed, caplog):
    probed(-4)
    precision.guard_bfloat16("cpu")
    assert not torch.backends.mkldnn.enabled
    assert "oneDNN is off" in caplog.text


def test_an_honest_cpu_is_asked_once_and_left_alone(probed):
    asked = probed(0)
    precision.guard_bfloat16("cpu")
    precision.guard_bfloat16("cpu")
    precision.guard_bfloat16("cuda")
    assert torch.backends.mkldnn.enabled
    assert len(asked) == 1


def in_float32(left, right):
    """This CPU may have no bfloat16 matmul of its own."""
    return (left.float() @ right.float()).bfloat16()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(precision, "INNER", 64)
    monkeypatch.setattr(precision, "WIDTH", 96)


def test_right_products_pass():
    precision.check_matmul("cpu", in_float32)


@pytest.mark.parametrize("fault", [float("nan"), 1.1])
def test_products_wrong_at_one_size_are_refused(fault, monkeypatch):
    monkeypatch.setenv(precision.LIMIT, "60")

    def wrong(left, right):
        return in_float32(left, right) * (fault if len(left) == 512 else 1.0)

    with pytest.raises(UserError, match=r"matmul on cpu is wrong \(512 x 64 .*PERCENTAGE is 60: unset it"):
        precision.check_matmul("cpu", wrong)
