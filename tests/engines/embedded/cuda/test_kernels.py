import numpy as np
import pytest
import torch

from tests.models.kernels.device import DEVICE

from penstock.engines.embedded.cuda.kernels import draw, paged_decode  # isort: skip

BLOCK, KV_HEADS, GROUP, DIM = 16, 2, 3, 32


def plain(query, rows, scaling, softcap, window, sinks):
    """One sequence, by hand: `rows` are its keys and values, the newest last."""
    keys = rows[..., :DIM].repeat_interleave(GROUP, 1)
    values = rows[..., DIM:].repeat_interleave(GROUP, 1)
    scores = torch.einsum("hd,nhd->hn", query, keys) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if window:
        scores[:, : max(0, len(rows) - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], 1)
    return torch.einsum("hn,nhd->hd", torch.softmax(scores, -1)[:, : len(rows)], values)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("softcap", "window", "with_sinks"), [(0.0, 0, False), (5.0, 0, False), (0.0, 37, False), (0.0, 0, True)]
)
def test_decode_attends_over_the_pages_and_writes_the_newest(softcap, window, with_sinks, splits):
    torch.manual_seed(0)
    positions = torch.tensor([0, 188, 49], device=DEVICE)
    pool = torch.randn(40, BLOCK, KV_HEADS, 2 * DIM, device=DEVICE)
    tables = torch.randperm(40, device=DEVICE)[:36].view(3, 12).to(torch.int32)
    query = torch.randn(3, KV_HEADS * GROUP, DIM, device=DEVICE)
    key, value = torch.randn(2, 3, KV_HEADS, DIM, device=DEVICE)
    sinks = torch.randn(KV_HEADS * GROUP, device=DEVICE) if with_sinks else None
    expected_pool = pool.clone()
    flat = expected_pool.view(-1, KV_HEADS, 2 * DIM)
    slots = tables[torch.arange(3), positions // BLOCK].long() * BLOCK + positions % BLOCK
    flat[slots] = torch.cat([key, value], -1)

    output = paged_decode(query, key, value, pool, tables, positions, sinks, 0.2, softcap, window, splits)

    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0)
    for row in range(3):
        places = torch.arange(int(positions[row]) + 1, device=DEVICE)
        mine = flat[tables[row][places // BLOCK].long() * BLOCK + places % BLOCK]
        torch.testing.assert_close(
            output[row], plain(query[row], mine, 0.2, softcap, window, sinks), rtol=1e-5, atol=1e-5
        )


def test_draws_follow_the_distribution_and_say_their_logprob():
    logits = (torch.randn(1, 37, generator=torch.Generator().manual_seed(3)) * 2).to(DEVICE)
    count = 4000 if DEVICE == "cuda" else 24  # the interpreter is slow
    seeds = torch.arange(count, device=DEVICE) * 7919
    tokens, logprobs = draw(
        logits.expand(count, -1).contiguous(),
        seeds,
        torch.zeros_like(seeds),
        torch.full((count,), 0.7, device=DEVICE),
    )
    expected = torch.log_softmax(logits[0] / 0.7, -1)
    torch.testing.assert_close(logprobs, expected[tokens], rtol=1e-5, atol=1e-5)
    if DEVICE == "cpu":
        return
    observed = np.bincount(tokens.cpu().numpy(), minlength=37) / count
    assert 0.5 * np.abs(observed - expected.exp().cpu().numpy()).sum() < 0.05


def test_a_draw_depends_on_seed_and_place_alone_and_zero_is_greedy():
    logits = torch.randn(4, 37, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    seeds = torch.tensor([5, 6, 7, 8], device=DEVICE)
    places = torch.tensor([1, 1, 2, 2], device=DEVICE)
    warm = torch.ones(4, device=DEVICE)
    together, _ = draw(logits, seeds, places, warm)
    alone = [int(draw(logits[i : i + 1], seeds[i : i + 1], places[i : i + 1], warm[:1])[0]) for i in range(4)]
    assert together.tolist() == alone
    greedy, logprobs = draw(logits, seeds, places, torch.zeros(4, device=DEVICE))
    assert greedy.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max(-1).values)
