import msgspec
import pytest

from penstock.records import AdapterSpec, Payload, TensorSpec, WeightUpdate
from penstock.sync.joined_update import join_updates


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


def test_buckets_of_publishers_take_turns() -> None:
    """With their payloads and what lies in them. One that has fewer is done before the others."""
    parts = []
    for name, count in (("a", 3), ("b", 1), ("c", 2)):
        specs = tuple(msgspec.structs.replace(update(name).tensors[0], bucket=at) for at in range(count))
        parts.append(
            msgspec.structs.replace(
                update(name),
                tensors=specs,
                buckets=tuple(f"{name}{at}" for at in range(count)),
                payloads=tuple(Payload(num_bytes=at, encoding="dense") for at in range(count)),
            )
        )
    joined = join_updates(parts)
    assert joined.buckets == ("a0", "b0", "c0", "a1", "c1", "a2")
    assert [payload.num_bytes for payload in joined.payloads] == [0, 0, 0, 1, 1, 2]
    places = [(spec.name, spec.bucket) for spec in joined.tensors]
    assert places == [("a", 0), ("a", 3), ("a", 5), ("b", 1), ("c", 2), ("c", 4)]


def test_parts_of_two_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="of one version"):
        join_updates([update("a"), update("b", version=2)])


def test_parts_of_two_adapters_are_refused() -> None:
    ranks = [
        update("a", selection="adapter", base=0, adapter=AdapterSpec(rank=rank, alpha=1.0)) for rank in (1, 2)
    ]
    with pytest.raises(ValueError, match="of one version"):
        join_updates(ranks)
