import pytest

from penstock.records import AdapterSpec, WeightUpdate


def test_an_adapters_scale_is_alpha_over_its_rank_or_over_the_root_of_it() -> None:
    assert AdapterSpec(rank=16, alpha=32.0).scale == 2.0
    assert AdapterSpec(rank=16, alpha=32.0, rslora=True).scale == 8.0


def test_a_partial_update_must_name_what_it_is_based_on() -> None:
    with pytest.raises(ValueError, match="must name its base"):
        WeightUpdate(version=3, transport="t", tensors=(), buckets=(), fingerprint={}, selection="adapter")
