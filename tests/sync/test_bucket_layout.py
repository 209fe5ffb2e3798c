import pytest
import torch

from penstock.sync.bucket_layout import Slice, lay_out, part, view


def test_tensors_are_packed_and_found_again() -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(()), "c": torch.arange(4), "d": torch.zeros(0)}
    specs, sizes = lay_out(tensors, bucket_bytes=128)
    assert [(spec.bucket, spec.offset) for spec in specs] == [(0, 0), (0, 64), (1, 0), (1, 64)]
    assert sizes == [128, 64]
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for spec in specs:
        assert (spec.start, spec.sizes) == ((), ())
        view(buckets[spec.bucket], spec).copy_(tensors[spec.name])
    for spec in specs:
        assert torch.equal(view(buckets[spec.bucket], spec), tensors[spec.name])


def test_a_large_tensor_is_split_by_rows_and_a_large_row_is_not() -> None:
    specs, sizes = lay_out({"a": torch.zeros(5, 16), "b": torch.zeros(2, 100)}, bucket_bytes=128)
    assert [(spec.name, spec.start, spec.sizes, spec.bucket) for spec in specs] == [
        ("a", (0, 0), (2, 16), 0),
        ("a", (2, 0), (2, 16), 1),
        ("a", (4, 0), (1, 16), 2),
        ("b", (0, 0), (1, 100), 3),
        ("b", (1, 0), (1, 100), 4),
    ]
    assert sizes == [128, 128, 64, 448, 448]
    assert {spec.shape for spec in specs} == {(5, 16), (2, 100)}


@pytest.mark.parametrize("start", [(0, 0), (4, 2)])
def test_pieces_of_a_slice_know_their_place_in_the_whole(start: tuple[int, int]) -> None:
    whole = torch.arange(80.0).view(10, 8)
    mine = whole[start[0] : start[0] + 5, start[1] : start[1] + 4]
    specs, _ = lay_out({"a": mine}, bucket_bytes=32, slices={"a": Slice((10, 8), start)})
    assert [spec.start for spec in specs] == [(start[0] + row, start[1]) for row in (0, 2, 4)]
    for spec in specs:
        assert torch.equal(part(mine, spec, start), part(whole, spec))
