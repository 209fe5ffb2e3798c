import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.engines.embedded import truncation
from penstock.engines.embedded.truncation import truncate
from penstock.types import SamplingParams


def dense(probs: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """The truncated, renormalised distribution over the whole vocabulary."""
    weights, ids = truncate(probs, params)
    table = torch.zeros(probs.shape, dtype=torch.float64).scatter_(1, ids, weights)
    return table / table.sum(dim=1, keepdim=True)


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(warpers(None, logits[None].double()), dim=-1)[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([5, 70, 700]),
    rows=st.lists(
        st.builds(
            SamplingParams,
            top_k=st.sampled_from([0, 0, 1, 4, 90]),
            top_p=st.sampled_from([1.0, 0.01, 0.6, 0.95, 0.999]),
            min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
        ),
        min_size=1,
        max_size=5,
    ),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_equals_transformers_warpers(
    seed: int, vocab: int, rows: list[SamplingParams], spread: float
) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    result = dense(torch.softmax(logits, dim=-1), rows)
    for row, params in enumerate(rows):
        torch.testing.assert_close(result[row], reference(logits[row], params), atol=2e-6, rtol=1e-4)


def test_the_likeliest_token_always_stays() -> None:
    probs = torch.tensor([[0.4, 0.35, 0.25]])
    for params in (SamplingParams(top_p=1e-9), SamplingParams(min_p=0.99), SamplingParams(top_k=1)):
        weights, ids = truncate(probs, [params])
        assert ids[0, 0] == 0
        assert (weights > 0).tolist() == [[True, False, False]]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    weights, _ = truncate(probs, [SamplingParams(top_k=2, top_p=0.55)])
    assert (weights > 0).sum() == 1
    weights, _ = truncate(probs, [SamplingParams(top_p=0.55)])
    assert (weights > 0).sum() == 2


@pytest.mark.parametrize("first", [1, 2, 1000])
def test_looks_further_when_the_first_candidates_do_not_suffice(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncation, "FIRST_CANDIDATES", first)
    probs = torch.full((1, 50), 0.02)
    weights, _ = truncate(probs, [SamplingParams(top_p=0.5)])
    assert int((weights > 0).sum()) == 25
