import pytest

from penstock.orchestration.gpus import Gpu, find_gpus, parse_gpus

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


def test_a_machine_without_the_tool_has_none() -> None:
    assert find_gpus({"PATH": "/nowhere"}) == ()
