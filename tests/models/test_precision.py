import subprocess

import pytest
import torch

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
