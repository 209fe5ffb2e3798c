from penstock.orchestration.gpus import Gpu, find_gpus, parse_gpus

TOLD = """0, GPU-aaaa-1, 143771, 143000, NVIDIA H200
1, GPU-bbbb-2, 81559, 81000, NVIDIA H100, 80GB
2, GPU-cccc-3, [N/A], [N/A], an odd one
"""
H200 = Gpu(name="NVIDIA H200", total_bytes=143771 << 20, free_bytes=143000 << 20)
H100 = Gpu(name="NVIDIA H100, 80GB", total_bytes=81559 << 20, free_bytes=81000 << 20)


def test_gpus_that_tell_their_memory() -> None:
    assert parse_gpus(TOLD, None) == (H200, H100)
    assert parse_gpus("No devices were found\n", None) == ()


def test_visible_devices_are_in_cudas_order() -> None:
    assert parse_gpus(TOLD, "1,0") == (H100, H200)
    assert parse_gpus(TOLD, "GPU-bbbb") == (H100,)
    assert parse_gpus(TOLD, "1,7,0") == (H100,)
    assert parse_gpus(TOLD, "") == ()
    assert parse_gpus(TOLD, "-1") == ()


def test_a_machine_without_the_tool_has_none() -> None:
    assert find_gpus({"PATH": "/nowhere"}) == ()
