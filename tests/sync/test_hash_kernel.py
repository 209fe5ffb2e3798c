import pytest
import torch

from tests.triton_device import DEVICE

from penstock.sync.fingerprint import fingerprint, unsigned  # isort: skip
from penstock.sync.hash_kernel import SPAN, CopyPlan, SumPlan  # isort: skip


def test_every_tensor_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes around the tile, one that is no multiple of 8 bytes, and one that changes its type."""
    monkeypatch.setattr("penstock.sync.hash_kernel.TILE", 64)
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(size, generator=generator).to(DEVICE) for size in (2, 128, 130, 1000, 3, 0)]
    sources.append(torch.randn(40, generator=generator).to(DEVICE))
    targets = [torch.full_like(source, float("nan")) for source in sources]
    targets[-1] = targets[-1].bfloat16()
    plan = CopyPlan.of(list(zip(targets, sources, strict=True)))
    assert len(plan.others) == 2
    for _ in range(2):
        plan.run()
        assert all(torch.equal(t, s.to(t.dtype)) for t, s in zip(targets, sources, strict=True))
        for source in sources:
            source.neg_()


def test_one_pass_copies_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sync.hash_kernel.SPAN", 2 * 1024)
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(size, generator=generator).to(DEVICE) for size in (1, 2048, 5000, 0)]
    targets = [torch.full_like(source, float("nan")) for source in sources]
    sums = SumPlan.of(sources, targets).run()
    assert unsigned(sums) == [fingerprint(source) for source in sources]
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))


def test_spans_far_into_a_tensor_count_their_places() -> None:
    """As the second half of a tensor of more than 2³² elements, of which only that half is there."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    for far in (2**32, 2**33 + SPAN):
        plan = SumPlan.of([values])
        plan.addresses.sub_(far * 2)
        plan.spans.starts.add_(far)
        plan.spans.sizes.add_(far)
        assert unsigned(plan.run()) == [fingerprint(values, offset=far)]
