import pytest
import torch

from tests.models.kernels.device import DEVICE

from penstock.models.kernels import sampling  # isort: skip


def make(rows, width, seed=0):
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.to(DEVICE), torch.arange(rows, device=DEVICE) + 100 * seed


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The ids that a sort leaves, row by row."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    chosen = order[:top_k] if top_k else order
    weights = probs[chosen]
    before = weights.cumsum(0) - weights
    chosen = chosen[before < top_p * weights.sum()] if top_p < 1 else chosen
    return set(chosen[probs[chosen] >= min_p * probs.max()].tolist())


CUTS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (1, 1.0, 0.0),
    (0, 0.7, 0.0),
    (40, 0.9, 0.0),
    (0, 1.0, 0.1),
    (30, 0.95, 0.02),
]


def test_truncation_keeps_what_sorting_keeps():
    logits, seeds = make(len(CUTS), 700)
    temperature = torch.linspace(0.7, 1.5, len(CUTS)).to(DEVICE)
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*CUTS, strict=True)]
    drawn = sampling.sample(
        logits, temperature, seeds, top_k=columns[0].int(), top_p=columns[1], min_p=columns[2]
    )
    for row, cut in enumerate(CUTS):
        want = kept_by_sorting(logits[row], float(temperature[row]), *cut)
        scaled = logits[row] / temperature[row]
        assert set((scaled >= drawn.thresholds[row]).nonzero()[:, 0].tolist()) == want
        assert int(drawn.num_kept[row]) == len(want)
        token = int(drawn.tokens[row])
        assert token in want
        normaliser = scaled[sorted(want)].logsumexp(0)
        torch.testing.assert_close(drawn.logprobs[row], scaled[token] - normaliser, atol=1e-5, rtol=1e-5)


def test_equal_scores_are_kept_together():
    logits = torch.zeros(1, 50, device=DEVICE)
    logits[0, 7:10] = 3.0
    drawn = sampling.sample(
        logits, torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE),
        top_k=torch.tensor([2], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    assert int(drawn.num_kept[0]) == 3


def test_draws_follow_the_distribution_across_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 8)
    probs = torch.tensor([0.05, 0.2, 0.0, 0.1, 0.02, 0.08, 0.3, 0.05, 0.15, 0.05])
    rows = 250
    logits = probs.log().expand(rows, -1).contiguous().to(DEVICE)
    seeds = torch.arange(rows, device=DEVICE)
    drawn = sampling.sample(logits, torch.ones(rows, device=DEVICE), seeds)
    counts = torch.bincount(drawn.tokens.cpu(), minlength=10).double()
    assert counts[2] == 0
    expected = probs.double() * rows
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[probs > 0].sum()
    assert float(chi_square) < 26.1  # 8 degrees of freedom, one in a thousand
    torch.testing.assert_close(drawn.logprobs.cpu(), probs.log()[drawn.tokens.cpu()], atol=1e-5, rtol=1e-5)


def test_a_seed_gives_the_same_draw_in_any_batch():
    logits, seeds = make(4, 300)
    temperature = torch.ones(4, device=DEVICE)
    together = sampling.sample(logits, temperature, seeds)
    alone = sampling.sample(logits[2:3], temperature[:1], seeds[2:3])
    assert int(alone.tokens[0]) == int(together.tokens[2])
    other = [sampling.sample(logits[2:3], temperature[:1], seeds[2:3] + 1000 + i).tokens[0] for i in range(8)]
    assert len({int(token) for token in other}) > 1


@pytest.mark.parametrize("width", [10, 4096, 5000])
def test_temperature_zero_takes_the_likeliest(width):
    logits, seeds = make(3, width)
    drawn = sampling.sample(logits, torch.zeros(3, device=DEVICE), seeds)
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-5, rtol=1e-5)
