"""Where kernel tests run: on a GPU if there is one, else on the CPU under Triton's interpreter.

Import this before any module with kernels: Triton reads its setting when a kernel is defined."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed: pip install 'penstock[gpu]'")


@pytest.fixture(autouse=True)
def device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take the path of a GPU also where there is none; a module has this when it imports it."""
    from penstock.engines.embedded.model_runner import ModelRunner
    from tests.engines.embedded.tiny import open_device_on_cpu

    if DEVICE == "cpu":
        monkeypatch.setattr(ModelRunner, "open_device", open_device_on_cpu)
