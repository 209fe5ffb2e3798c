import numpy as np
import pytest
import torch

from penstock.errors import FingerprintMismatch
from penstock.sync.fingerprint import (
    HOST_PIECE,
    Fingerprinter,
    Shard,
    compare,
    fingerprint,
    fingerprints,
    sum_by_torch,
    sum_on_host,
    walk_from,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_shards_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = (torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    flat = whole.flatten()
    parts = [fingerprint(flat[:20]), fingerprint(flat[20:63], offset=20), fingerprint(flat[63:], offset=63)]
    assert sum(parts) % 2**64 == fingerprint(whole)


def by_hand(bits: list[int], first: int) -> int:
    """The definition, in whole numbers."""
    total = 0
    for index, each in enumerate(bits, first):
        product = 0x5851F42D * ((each + 0x61C88647 * index + 0x2545F491 * (index >> 32)) % 2**32)
        total += product % 2**32 * (product >> 32 | 2**31)
    return total % 2**64


def test_it_is_what_the_definition_says() -> None:
    values = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.bfloat16)
    patterns = [0x3F80, 0xFFFFC000, 0, 0x3F00]  # 16 bits are extended by their sign
    for first in (0, 7, 2**32 - 2, 2**33):
        assert fingerprint(values, offset=first) == by_hand(patterns, first)
    long = torch.tensor([5, -1, 2**40 + 3])
    assert fingerprint(long, offset=2) == by_hand([5, 0, 2**32 - 1, 2**32 - 1, 3, 2**8], 4)
    assert fingerprint(torch.tensor([200, 3], dtype=torch.uint8)) == by_hand([200, 3], 0)


def test_places_count_beyond_32_bits() -> None:
    tensor = torch.randn(6, generator=torch.Generator().manual_seed(5))
    seen = {fingerprint(tensor, offset=far) for far in (0, 2**32, 2**33, 3 * 2**32)}
    assert len(seen) == 4


@pytest.mark.parametrize("offset", [0, 5, 2**32 - 500])
def test_torch_gives_what_the_host_gives(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.randn(1000, generator=torch.Generator().manual_seed(1)).view(torch.int32)
    whole = fingerprint(bits, offset=offset)
    assert sum_by_torch(bits, offset) == whole
    monkeypatch.setattr("penstock.sync.fingerprint._PIECE", 64)
    assert sum_by_torch(bits, offset) == whole


def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(size): torch.ones(size) for size in (1, 100, 50)}
    before = fingerprints(tensors)
    monkeypatch.setattr("penstock.sync.fingerprint._THREADS_FROM", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert fingerprints(tensors) == before == {name: fingerprint(t) for name, t in tensors.items()}


def test_any_small_change_shows() -> None:
    tensor = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    before = fingerprint(tensor)
    for change in (
        lambda t: t.view(-1)[0].add_(1e-6 * t.view(-1)[0]),
        lambda t: t.view(-1)[7].neg_(),
    ):
        changed = tensor.clone()
        change(changed)
        assert fingerprint(changed) != before
    swapped = tensor.view(-1)[torch.tensor([1, 0, *range(2, 20)])]
    assert fingerprint(swapped) != before


def test_pairs_of_changes_do_not_cancel() -> None:
    """What a sum of values alone would miss: swaps, and one up where another goes down."""
    generator = torch.Generator().manual_seed(6)
    values = (torch.randn(512, generator=generator) * 0.02).bfloat16()
    bits = values.view(torch.int16)
    before = fingerprint(values)
    for first, second in torch.randint(0, 512, (400, 2), generator=generator).tolist():
        if bits[first] == bits[second]:
            continue
        swapped, moved = bits.clone(), bits.clone()
        swapped[[first, second]] = bits[[second, first]]
        moved[first] += 1
        moved[second] -= 1
        assert before not in (
            fingerprint(swapped.view(torch.bfloat16)),
            fingerprint(moved.view(torch.bfloat16)),
        )


def test_zeros_of_another_length_differ() -> None:
    assert fingerprint(torch.zeros(8)) != fingerprint(torch.zeros(9))
    assert fingerprint(torch.zeros(0)) == 0


def test_a_difference_names_what_is_wrong() -> None:
    live = {"a": torch.ones(3), "b": torch.ones(4)}
    expected = fingerprints(live)
    compare(expected, fingerprints(live), 3)
    live["b"][2] = 2
    with pytest.raises(FingerprintMismatch, match=r"version 3: 1 of 2 tensors .* \(b\)"):
        compare(expected, fingerprints(live), 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_the_kernel_gives_the_same_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="triton is not installed: pip install 'penstock[gpu]'")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr("penstock.sync.hash_kernel.SPAN", 2 * 4096)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        str(size): (torch.randn(size, generator=generator) * 50).to(dtype).to(device)
        for size in (1, 4095, 4096, 20_001, 0)
    }
    tensors["unaligned"] = tensors["20001"][3:]
    assert Fingerprinter(fused=True)(tensors) == {name: fingerprint(t) for name, t in tensors.items()}


def test_a_plan_follows_the_tensors_when_they_move() -> None:
    hashing = Fingerprinter()
    first = torch.randn(9, generator=torch.Generator().manual_seed(4))
    second = first.clone()
    assert hashing({"a": first}) == hashing({"a": second})
    second[0] += 1
    assert hashing({"a": first}) != hashing({"a": second})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_slices_in_any_dimension_add_up_to_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sync.fingerprint._PIECE", 16)
    tensor = (torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(7)) * 50).to(dtype)
    for dim in range(3):
        shards = []
        for first, size in ((0, 2), (2, 1), (3, tensor.shape[dim] - 3)):
            start = tuple(first if axis == dim else 0 for axis in range(3))
            shards.append(Shard("a", tensor.narrow(dim, first, size), tuple(tensor.shape), start))
        assert [shard.first is None for shard in shards] == [dim > 0] * 3
        assert Fingerprinter().start(shards)() == fingerprints({"a": tensor})
        moved = [shards[0], shards[1], Shard("a", shards[2].values, shards[2].shape, (0, 0, 0))]
        assert Fingerprinter().start(moved)() != fingerprints({"a": tensor})


def test_places_of_scattered_slices_count_beyond_32_bits() -> None:
    """Two columns of a tensor of 2³¹ × 4 elements, of which a few rows are there."""
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(8))
    first = 2**30 - 1
    shard = Shard("a", rows, (2**31, 4), (first, 1))
    alone = [
        fingerprint(rows[row, column].view(1), offset=4 * (first + row) + 1 + column)
        for row in range(3)
        for column in range(2)
    ]
    assert shard.fingerprint() == sum(alone) % 2**64


def test_the_kernel_counts_places_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="triton is not installed: pip install 'penstock[gpu]'")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16, torch.float64):
        tensor = torch.randn(50, 101, generator=torch.Generator().manual_seed(9)).to(device, dtype)
        shards = [Shard("a", tensor[first : first + 25], (50, 101), (first, 0)) for first in (0, 25)]
        assert all(shard.suits_kernel for shard in shards)
        assert Fingerprinter(fused=True).start(shards)() == {"a": fingerprint(tensor)}
    far = Shard("a", tensor[:25], (2**27, 101), (2**26, 0))
    assert not far.suits_kernel


def test_pieces_do_not_show() -> None:
    bits = np.random.default_rng(0).integers(-(2**15), 2**15, HOST_PIECE + 100).astype(np.int16)
    apart = sum_on_host(bits[:77], 3) + sum_on_host(bits[77:], 80)
    assert sum_on_host(bits, 3) == apart % 2**64


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32])
def test_the_host_adds_up_what_the_definition_says(kind: type[np.integer]) -> None:
    bits = np.array([0, 1, 100, 127], dtype=kind)
    for first in (0, 2**32 - 2):
        expected = 0
        for index, each in enumerate(bits.tolist(), first):
            product = 0x5851F42D * ((each + 0x61C88647 * index + 0x2545F491 * (index >> 32)) % 2**32)
            expected += product % 2**32 * (product >> 32 | 2**31)
        assert sum_on_host(bits, first) == expected % 2**64


def test_nothing_adds_up_to_nothing() -> None:
    assert sum_on_host(np.zeros(0, dtype=np.int16), 7) == 0


def test_the_walk_goes_on_beyond_32_bits() -> None:
    assert [walk_from(index) for index in (0, 1, 2, 2**32, 2**32 + 1)] == [
        0,
        0x61C88647,
        2 * 0x61C88647 - 2**32,
        0x2545F491,
        0x61C88647 + 0x2545F491 - 2**32,
    ]
