import torch

from penstock.bench.sync.copy_figure import measure_copies


def test_the_slower_copy_is_held_against_memcpy() -> None:
    found = measure_copies({"a": torch.ones(1 << 16), "b": torch.ones(100)}, updates=2)
    assert found["bytes"] == 4 * ((1 << 16) + 100)
    slower = min(found["snapshot_gb_per_s"], found["load_gb_per_s"])
    assert abs(found["vs_memcpy"] - slower / found["memcpy_gb_per_s"]) < 1e-9
    assert abs(found["hash_vs_memcpy"] - found["hash_gb_per_s"] / found["memcpy_gb_per_s"]) < 1e-9
