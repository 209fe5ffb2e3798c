from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.engines.embedded import sampler
from penstock.engines.embedded.sampler import draw, exponentials, shape_logits, streams, truncate
from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.records import SamplingParams
from tests.engines.contract import ask


def row(prompt: list[int] | None = None, output: list[int] | None = None, **options: Any) -> Sequence:
    request = ask("a", prompt, **{"max_tokens": 64, **options})
    seed = request.sampling.seed or 0
    seq = sequence_of(request, arrival=0, max_context=100, seed=seed)
    seq.tokens.extend(output or [])
    return seq


def frequencies(logits: torch.Tensor, count: int = 20000, **options: Any) -> torch.Tensor:
    """How often each token comes out, over many seeds."""
    drawn = draw(logits.expand(count, -1), [row(seed=n, **options) for n in range(count)])
    return torch.bincount(torch.tensor(drawn.tokens), minlength=logits.shape[0]) / count


@pytest.mark.parametrize("vocab", [2, 7, 64, 300])
def test_tokens_come_as_often_as_their_probability_says(vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    probs = torch.softmax(logits, dim=-1)
    count = 20000
    z = (frequencies(logits, count) - probs) / (probs * (1 - probs) / count).sqrt()
    assert z.abs().max() < 4.5
    assert 0.7 < float((z**2).mean()) < 1.5 or vocab < 10


def test_truncated_draws_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    probs = torch.softmax(logits[:3], dim=-1)
    result = frequencies(logits, top_k=3)
    assert result[3:].tolist() == [0, 0]
    assert (result[:3] - probs).abs().max() < 0.015


def test_logprobs_are_of_the_distribution_drawn_from() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    sequences = [
        row(seed=1),
        row(seed=2, temperature=0.5),
        row(seed=3, temperature=0.7, top_k=3),
        row(seed=4, temperature=0.0, top_k=3),
    ]
    drawn = draw(logits, sequences)
    third = logits[2] / 0.7
    kept = third.topk(3).indices
    expected = [
        torch.log_softmax(logits[0], -1)[drawn.tokens[0]],
        torch.log_softmax(logits[1] / 0.5, -1)[drawn.tokens[1]],
        (third - torch.logsumexp(third[kept], 0))[drawn.tokens[2]],
        torch.log_softmax(logits[3], -1)[drawn.tokens[3]],
    ]
    torch.testing.assert_close(torch.tensor(drawn.logprobs), torch.stack(expected), atol=1e-6, rtol=0)
    assert drawn.tokens[2] in kept.tolist()
    assert drawn.tokens[3] == int(logits[3].argmax())


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"temperature": 0.3}])
def test_a_seed_gives_the_same_tokens_in_any_company(options: dict[str, Any]) -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    sequences = [row(seed=n, output=[1] * (n % 5), **options) for n in range(40)]
    alone = [draw(logits[n : n + 1], [sequences[n]]).tokens[0] for n in range(40)]
    mixed = [row(seed=n, temperature=0.0) if n % 3 == 0 else seq for n, seq in enumerate(sequences)]
    among = draw(logits + 1e-6 * torch.randn_like(logits), mixed).tokens
    assert [a for n, a in enumerate(among) if n % 3] == [a for n, a in enumerate(alone) if n % 3]


def test_every_place_of_a_sequence_has_its_own_noise() -> None:
    logits = torch.zeros(50, 1000)
    drawn = draw(logits, [row(seed=5, output=[0] * n) for n in range(50)])
    assert len(set(drawn.tokens)) > 40


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((200, 9), -torch.inf)
    logits[:, 4] = 0.0
    logits[:, 8] = 0.0
    assert set(draw(logits, [row(seed=n) for n in range(200)]).tokens) == {4, 8}
    assert set(draw(logits, [row(seed=n, top_p=0.9) for n in range(200)]).tokens) == {4, 8}


def test_recorded_masks_name_what_truncation_left() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0], [1.0, 0, 0, 0]])
    sequences = [
        row(top_k=2, record_sampling_mask=True),
        row(top_k=2),
        row(top_p=0.9, record_sampling_mask=True),
        row(top_p=0.9999, record_sampling_mask=True),
    ]
    kept = draw(logits, sequences).kept
    assert {key: value.tolist() for key, value in kept.items()} == {0: [1, 3], 2: [0], 3: []}
    assert kept[0].dtype == np.int32


def test_masks_of_a_mixed_batch_stay_with_their_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(3, 1)
    kept = draw(logits, [row(), row(temperature=0.0), row(top_k=1, record_sampling_mask=True)]).kept
    assert {key: value.tolist() for key, value in kept.items()} == {2: [1]}


def test_plain_requests_leave_the_logits_alone() -> None:
    logits = torch.randn(2, 9)
    assert shape_logits(logits, [row(), row(temperature=0.3)]) is logits


def test_bias_is_added_to_its_tokens() -> None:
    logits = torch.zeros(2, 4)
    result = shape_logits(logits, [row(logit_bias={1: 2.5, 3: -1.0}), row()])
    assert result.tolist() == [[0, 2.5, 0, -1.0], [0, 0, 0, 0]]
    assert logits.sum() == 0


def test_repetition_counts_prompt_and_output_as_transformers_does() -> None:
    logits = torch.randn(1, 12)
    result = shape_logits(logits, [row(prompt=[1, 2, 2], output=[7], repetition_penalty=1.7)])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 7]]), logits.clone())
    torch.testing.assert_close(result, expected)


def test_presence_counts_output_only_and_once() -> None:
    logits = torch.zeros(3, 5)
    result = shape_logits(
        logits,
        [
            row(prompt=[0, 1], output=[2, 2, 4], presence_penalty=0.5),
            row(prompt=[0, 1], output=[], presence_penalty=0.5),
            row(prompt=[0, 1], output=[3], presence_penalty=-2.0),
        ],
    )
    assert result.tolist() == [[0, 0, -0.5, 0, -0.5], [0] * 5, [0, 0, 0, 2.0, 0]]


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    logits = torch.zeros(2, 4)
    options = {"min_tokens": 2, "stop_token_ids": (1, 3)}
    result = shape_logits(logits, [row(output=[0], **options), row(output=[0, 0], **options)])
    assert result.tolist() == [[0, -torch.inf, 0, -torch.inf], [0, 0, 0, 0]]


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
    monkeypatch.setattr(sampler, "FIRST_CANDIDATES", first)
    probs = torch.full((1, 50), 0.02)
    weights, _ = truncate(probs, [SamplingParams(top_p=0.5)])
    assert int((weights > 0).sum()) == 25


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_a_number_depends_on_seed_place_and_cell_alone() -> None:
    alone = exponentials(streams(words(7), words(3)), np.arange(5, dtype=np.uint64))
    among = exponentials(streams(words(1, 7, 2**64 - 1), words(9, 3, 0)), np.arange(2, 9, dtype=np.uint64))
    np.testing.assert_array_equal(alone[0, 2:], among[1, :3])


def test_seed_place_and_cell_each_change_it() -> None:
    base = exponentials(streams(words(7, 8, 7), words(3, 3, 4)), np.arange(4, dtype=np.uint64))
    assert len(np.unique(base)) == base.size


def test_numbers_are_exponential_and_positive() -> None:
    rows = np.arange(400, dtype=np.uint64)
    values = exponentials(streams(rows, rows), np.arange(500, dtype=np.uint64)).ravel()
    assert values.min() > 0
    assert abs(values.mean() - 1) < 0.01
    assert abs(values.var() - 1) < 0.02
    levels = np.exp(-np.quantile(values, [0.1, 0.5, 0.9]))
    np.testing.assert_allclose(levels, [0.9, 0.5, 0.1], atol=0.005)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_cells_may_differ_by_row() -> None:
    stream = streams(words(1, 2), words(0, 0))
    cells = np.array([[4, 5], [6, 4]], dtype=np.uint64)
    plain = exponentials(stream, np.arange(8, dtype=np.uint64))
    np.testing.assert_array_equal(exponentials(stream, cells), [plain[0, [4, 5]], plain[1, [6, 4]]])
