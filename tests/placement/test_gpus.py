import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.placement.gpus import Gpu, find_gpus, parse_gpus, why_missing

TOLD = """0, GPU-aaaa-1, 143771, 143000, 9.0, NVIDIA H200
1, GPU-bbbb-2, 81559, 81000, [N/A], NVIDIA H100, 80GB
2, GPU-cccc-3, [N/A], [N/A], 9.0, an odd one
"""
H200 = Gpu(name="NVIDIA H200", total_bytes=143771 << 20, free_bytes=143000 << 20)
H100 = Gpu(name="NVIDIA H100, 80GB", total_bytes=81559 << 20, free_bytes=81000 << 20)


def test_gpus_that_tell_their_memory() -> None:
    assert parse_gpus(TOLD, None) == (H200, H100)
    assert parse_gpus("No devices were found\n", None) == ()


@pytest.mark.parametrize(("capability", "has_it"), [("7.5", False), ("8.0", True), ("12.0", True)])
def test_bfloat16_begins_with_compute_capability_8(capability: str, has_it: bool) -> None:
    (gpu,) = parse_gpus(f"0, GPU-a, 16000, 15000, {capability}, Tesla", None)
    assert gpu.has_bfloat16 is has_it


def test_visible_devices_are_in_cudas_order() -> None:
    assert parse_gpus(TOLD, "1,0") == (H100, H200)
    assert parse_gpus(TOLD, "GPU-bbbb") == (H100,)
    assert parse_gpus(TOLD, "1,7,0") == (H100,)
    assert parse_gpus(TOLD, "") == ()
    assert parse_gpus(TOLD, "-1") == ()


@pytest.mark.parametrize(
    ("device", "gpus", "why"),
    [
        ("cpu", (), None),
        ("auto", (), None),
        ("cuda", (H200,), None),
        ("cuda:1", (H200, H100), None),
        ("cuda:99", (H200, H100), "needs more than the 2 GPUs that this machine shows, .*; use cuda:1$"),
    ],
)
def test_a_device_that_the_machine_does_not_show_is_missing(
    device: str, gpus: tuple[Gpu, ...], why: str | None, tmp_path: Path
) -> None:
    found = why_missing(device, gpus, devices=tmp_path)
    assert found is None if why is None else re.match(why, found or "")


@pytest.mark.parametrize(
    ("version", "built", "file", "why"),
    [
        (
            "2.13.0+cpu",
            "cuda: Optional[str] = None",
            "nvidia0",
            "needs torch with CUDA, and torch 2.13.0[+]cpu",
        ),
        (
            "2.13.0",
            "cuda: Optional[str] = None\nhip = None",
            "nvidia0",
            "needs torch with CUDA, and torch 2.13.0 is",
        ),
        ("2.13.0", "cuda: Optional[str] = '12.8'", "null", "needs a GPU, and this machine has none"),
        ("2.13.0", "cuda: Optional[str] = '12.8'", "nvidia0", None),
        ("2.13.0", "cuda = None\nhip: Optional[str] = '6.4'", "kfd", None),
        ("2.13.0", "", "nvidiactl", "needs a GPU, and this machine has none"),
    ],
)
def test_without_the_tool_torchs_build_and_the_systems_files_tell(
    version: str, built: str, file: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(built)
    (tmp_path / file).touch()
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    found = why_missing("cuda", (), devices=tmp_path)
    assert found is None if why is None else re.match(why, found or "")


def test_a_machine_without_the_tool_has_none() -> None:
    assert find_gpus({"PATH": "/nowhere"}) == ()
