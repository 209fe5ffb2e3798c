import math

from penstock.bench.sync.plain_copy import plain_copy_s
from penstock.bench.sync.update_timing import against_copy, lost_s, update_bytes
from penstock.records import Payload, TensorSpec, WeightUpdate


def make_update(*payloads: Payload) -> WeightUpdate:
    spec = TensorSpec(name="a", shape=(10,), dtype="float32", bucket=0, offset=0, num_bytes=40)
    return WeightUpdate(
        version=1, transport="http", tensors=(spec,), buckets=("x",), fingerprint={}, payloads=payloads
    )


def test_bytes_are_those_that_travel() -> None:
    assert update_bytes(make_update()) == 40
    assert update_bytes(make_update(Payload(num_bytes=7))) == 7


def test_lost_time_is_what_useful_tokens_do_not_explain() -> None:
    record = {"seconds": 2.0, "tokens": 30.0, "discarded_tokens": 20.0}
    assert math.isclose(lost_s(record, rate=10.0), 1.0)
    assert lost_s(record | {"tokens": 100.0}, rate=10.0) == 0.0


def test_times_are_held_against_a_copy_of_the_same_bytes() -> None:
    result = {"bytes": 4096.0, "hashed_bytes": 8e6, "stall_ms": 3.0, "verify_ms": 4.0}
    copy_ms = plain_copy_s(4096, "cpu") * 1e3
    compared = against_copy(result, "cpu")
    assert compared == {
        "copy_ms": copy_ms,
        "copies": {"stall": 3.0 / copy_ms},
        "hash_gb_per_s": 2.0,
        "hash_vs_copy": plain_copy_s(8_000_000, "cpu") * 1e3 / 4.0,
    }
