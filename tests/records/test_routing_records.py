import numpy as np
import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.errors import BlobLost
from penstock.records import RoutingShape
from penstock.records.blobs import routes_within
from penstock.records.routing_records import check_routing, fetch_routes, store_routes


def shape(**changes) -> RoutingShape:
    return RoutingShape(**{"family": "M", "num_layers": 3, "num_experts": 8, "top_k": 2, **changes})


def random_routes(of: RoutingShape, num_tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, of.num_experts, (num_tokens, of.num_layers, of.top_k))


@pytest.mark.parametrize(("num_experts", "id_bytes"), [(8, 1), (256, 1), (257, 2), (512, 2)])
def test_routes_come_back_as_they_were_stored(num_experts: int, id_bytes: int) -> None:
    of, blobs = shape(num_experts=num_experts), MemoryBlobs()
    routes = random_routes(of, 10)
    ref = store_routes(blobs, "s/a", routes, of, start=4)
    assert (ref.start, ref.end, ref.blob.num_bytes) == (4, 14, 10 * 3 * 2 * id_bytes)
    assert np.array_equal(fetch_routes(blobs, ref), routes)


def test_a_part_is_read_from_the_same_blob() -> None:
    blobs = MemoryBlobs()
    routes = random_routes(shape(), 10)
    ref = store_routes(blobs, "s/a", routes, shape(), start=4)
    part = ref.within(6, 9).within(0, 8)
    assert (part.start, part.end) == (6, 8)
    assert np.array_equal(fetch_routes(blobs, part), routes[2:4])
    assert ref.within(0, 4) is None
    assert ref.within(14, 20) is None
    assert routes_within((ref,), 13, 20)[0].num_tokens == 1


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (shape(num_layers=2), r"must hold 4 tokens of 6 bytes, got 16 bytes"),
        (shape(top_k=1), r"must hold 4 tokens of 6 bytes, got 12 bytes"),
    ],
)
def test_a_blob_of_another_shape_is_lost(stored: RoutingShape, message: str) -> None:
    blobs = MemoryBlobs()
    ref = store_routes(blobs, "s/a", random_routes(stored, 4), stored, start=0)
    claimed = type(ref)(start=0, num_tokens=4, shape=shape(), blob=ref.blob)
    with pytest.raises(BlobLost, match=message):
        fetch_routes(blobs, claimed)


def test_an_expert_that_is_not_there_is_named() -> None:
    blobs = MemoryBlobs()
    ref = store_routes(blobs, "s/a", np.full((2, 3, 2), 8), shape(), start=0)
    with pytest.raises(BlobLost, match="s/a names expert 8, and there are 8"):
        fetch_routes(blobs, ref)


def test_a_record_of_another_model_is_named() -> None:
    ref = store_routes(MemoryBlobs(), "s/a", random_routes(shape(), 2), shape(), start=0)
    check_routing(ref, shape())
    with pytest.raises(
        BlobLost, match="of M with 3 routers, each for 2 of 8 experts, and the model is N with"
    ):
        check_routing(ref, shape(family="N"))
    with pytest.raises(BlobLost, match="the model has no experts"):
        check_routing(ref, None)
