import pytest
import torch

from tests.triton_device import DEVICE

from penstock.trainer.forward.logprob_head import KeptIds, LogitShape, Projection, _Logprobs  # isort: skip
from penstock.trainer.forward.logprob_kernel import gradient, statistics  # isort: skip


def make(rows=5, width=4100, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, width, generator=generator) * 3).to(DEVICE)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.7, 1.3])[:rows].to(DEVICE)
    targets = torch.tensor([0, 17, width - 1, 3, 4097])[:rows].to(DEVICE)
    return logits, temperature, targets


def shaped(logits, scale, softcap):
    value = logits.double() * scale
    return value if softcap is None else softcap * torch.tanh(value / softcap)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (1.0, 4.0), (0.5, 4.0)])
def test_statistics_equal_a_float64_softmax(scale, softcap):
    logits, temperature, _ = make()
    lse, entropy = statistics(logits, temperature, scale=scale, softcap=softcap)
    full = (shaped(logits, scale, softcap) / temperature[:, None]).log_softmax(-1)
    want_lse = (shaped(logits, scale, softcap) / temperature[:, None]).logsumexp(-1)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 4.0)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_equals_autograd(scale, softcap, with_entropy):
    logits, temperature, targets = make()
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], device=DEVICE)
    leaf = logits.double().requires_grad_()
    full = (shaped(leaf, scale, softcap) / temperature[:, None]).log_softmax(-1)
    value = (full.gather(1, targets[:, None])[:, 0] * weights).sum()
    if with_entropy:
        value = value - ((full.exp() * full).sum(-1) * weights.flip(0)).sum()
    (want,) = torch.autograd.grad(value, leaf)
    lse, entropy = statistics(logits, temperature, scale=scale, softcap=softcap)
    from_entropy = weights.flip(0) if with_entropy else None
    got = gradient(
        logits, targets, temperature, lse, entropy, weights, from_entropy,
        dtype=torch.float32, scale=scale, softcap=softcap,
    )  # fmt: skip
    torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=1e-4)


def test_cut_ids_have_no_probability_and_no_gradient():
    logits, temperature, targets = make()
    kept = torch.arange(logits.shape[1], device=DEVICE) % 5 == 2
    kept[targets] = True
    cut = logits.masked_fill(~kept, -float("inf"))
    lse, entropy = statistics(cut, temperature)
    alone = (logits[:, kept] / temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(entropy, -(alone.exp() * alone).sum(-1), atol=1e-4, rtol=1e-5)
    ones = torch.ones(5, device=DEVICE)
    got = gradient(cut, targets, temperature, lse, entropy, ones, ones, dtype=torch.float32)
    assert float(got[:, ~kept].abs().max()) == 0.0
    assert float(got[:, kept].abs().max()) > 0.1


@pytest.mark.parametrize(
    "kept", [None, KeptIds(offsets=torch.tensor([0, 2, 2, 5]), ids=torch.tensor([1, 4, 0, 2, 6]))]
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_head_gives_the_same_with_kernels_and_without(kept, softcap):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 4, generator=generator)
    weight, bias = torch.randn(7, 4, generator=generator), torch.randn(7, generator=generator)
    targets, temperature = torch.tensor([4, 5, 0]), torch.tensor([1.0, 0.6, 1.7])
    if kept is not None:
        kept = KeptIds(offsets=kept.offsets, ids=kept.ids.to(DEVICE))
    results = []
    for fused in (False, True):
        leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (states, weight, bias)]
        shape = LogitShape(scale=0.7, softcap=softcap)
        how = Projection(kept=kept, shape=shape, chunk=2, fused=fused, vocabulary=None)
        logprobs, entropy = _Logprobs.apply(*leaves, targets.to(DEVICE), temperature.to(DEVICE), how)
        value = (logprobs * torch.tensor([1.0, 2.0, -1.0], device=DEVICE)).sum() + entropy.square().sum()
        results.append([logprobs, entropy, *torch.autograd.grad(value, leaves)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


def test_logits_that_are_given_are_not_written_to():
    """A model whose head is not known gives its full logits; truncation is cut out of a copy."""
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    before = logits.clone()
    kept = KeptIds(offsets=torch.tensor([0, 2, 2, 5]), ids=torch.tensor([1, 4, 0, 2, 6], device=DEVICE))
    targets, temperature = torch.tensor([4, 5, 0], device=DEVICE), torch.ones(3, device=DEVICE)
    for fused in (False, True):
        how = Projection(kept=kept, shape=LogitShape(), chunk=2, fused=fused, vocabulary=None)
        logprobs, _ = _Logprobs.apply(logits, None, None, targets, temperature, how)
        want = [before[0, [1, 4]].log_softmax(0)[1], before[1].log_softmax(0)[5]]
        want.append(before[2, [0, 2, 6]].log_softmax(0)[0])
        torch.testing.assert_close(logprobs, torch.stack(want), atol=1e-5, rtol=1e-5)
        assert torch.equal(logits, before)
