from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.embedded.sampler import draw
from penstock.engines.embedded.sequence import Sequence, sequence_of
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
