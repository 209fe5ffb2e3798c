import pytest

from penstock.sync.joined_update import join_updates
from penstock.types import AdapterSpec, TensorSpec, WeightUpdate


def update(name: str, version: int = 1, **options: object) -> WeightUpdate:
    spec = TensorSpec(name=name, shape=(4,), dtype="float32", bucket=0, offset=0, num_bytes=16)
    return WeightUpdate(
        version=version,
        transport="none",
        tensors=(spec,),
        buckets=(f"{name}'s",),
        fingerprint={name: 2**63 + 5},
        **options,  # type: ignore[arg-type]
    )


def test_buckets_are_numbered_anew_and_fingerprints_add_up() -> None:
    joined = join_updates([update("a"), update("b"), update("a", sends=True)])
    assert [(spec.name, spec.bucket) for spec in joined.tensors] == [("a", 0), ("b", 1), ("a", 2)]
    assert joined.buckets == ("a's", "b's", "a's")
    assert joined.fingerprint == {"a": 10, "b": 2**63 + 5}
    assert joined.sends


def test_parts_of_two_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="of one version"):
        join_updates([update("a"), update("b", version=2)])


def test_parts_of_two_adapters_are_refused() -> None:
    ranks = [
        update("a", selection="adapter", base=0, adapter=AdapterSpec(rank=rank, alpha=1.0)) for rank in (1, 2)
    ]
    with pytest.raises(ValueError, match="of one version"):
        join_updates(ranks)
