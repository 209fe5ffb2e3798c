import pytest
import torch

from penstock.errors import FingerprintMismatch
from penstock.sync.fingerprint import Fingerprinter, compare, fingerprint, fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_shards_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = (torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    flat = whole.flatten()
    parts = [fingerprint(flat[:20]), fingerprint(flat[20:63], offset=20), fingerprint(flat[63:], offset=63)]
    assert sum(parts) % 2**64 == fingerprint(whole)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    whole = fingerprint(tensor)
    monkeypatch.setattr("penstock.sync.fingerprint._PIECE", 64)
    assert fingerprint(tensor) == whole


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
    monkeypatch.setattr("penstock.sync.kernel.SPAN", 2 * 4096)
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
