import pytest
import torch
from torch import nn

from penstock.engines.embedded.batch_layout import lay_out
from penstock.engines.embedded.paged_attention import LayerShape, PagedAttention, _attend
from penstock.engines.embedded.scheduler import Span
from penstock.models.attention_options import AttentionOptions
from penstock.trainer.forward.packed_attention import causal_attention
from tests.engines.embedded.test_batch_layout import CPU, seq

HEADS, KV_HEADS, DIM = 6, 2, 8


def module() -> nn.Module:
    result = nn.Module()
    result.layer_idx = 0
    return result


def naive(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """(tokens, heads, dim) by the definition, one query and one head at a time."""
    result = torch.zeros(query.shape[1], HEADS, DIM)
    for token in range(query.shape[1]):
        place = first + token
        begin = 0 if window is None else max(0, place + 1 - window)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = keys[kv, begin : place + 1] @ query[head, token] * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = torch.softmax(scores, dim=0)[: place + 1 - begin]
            result[token, head] = weights @ values[kv, begin : place + 1]
    return result


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_the_definition(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    sinks = torch.randn(HEADS) if with_sinks else None
    cache = PagedAttention(
        {0: LayerShape(KV_HEADS, DIM, DIM)}, num_blocks=12, block_size=4, dtype=torch.float32, device=CPU
    )
    sequences = [
        seq([0] * 11, [9, 3, 6]),
        seq([0] * 7, [1, 0]),
        seq([0] * 6, [4, 5]),
        seq([0] * 2, [11]),
    ]
    lengths = [s.num_tokens for s in sequences]
    keys = [torch.randn(KV_HEADS, n, DIM) for n in lengths]
    values = [torch.randn(KV_HEADS, n, DIM) for n in lengths]
    queries = [torch.randn(HEADS, n, DIM) for n in lengths]
    passes = [[4, 6, 3, 1], [6, 1, 2, 1], [1, 0, 1, 0]]
    done = [0, 0, 0, 0]
    for counts in passes:
        spans: list[Span] = [(s, at, n) for s, at, n in zip(sequences, done, counts, strict=True) if n > 0]
        names = [number for number, n in enumerate(counts) if n > 0]
        layout = lay_out(spans, 4, CPU)
        order = _order(layout.last.tolist(), [span[2] for span in spans])
        parts = [(names[each], done[names[each]], counts[names[each]]) for each in order]

        def row(columns: list[torch.Tensor], parts: list[tuple[int, int, int]] = parts) -> torch.Tensor:
            return torch.cat([columns[name][:, at : at + n] for name, at, n in parts], dim=1)[None]

        cache.begin(layout, [])
        output = cache(
            module(),
            row(queries),
            row(keys),
            row(values),
            AttentionOptions(scaling=0.3, sliding_window=window, softcap=softcap, sinks=sinks),
        )
        expected = torch.cat(
            [
                naive(queries[name][:, at : at + n], keys[name], values[name], at, window, softcap, sinks)
                for name, at, n in parts
            ]
        )
        torch.testing.assert_close(output[0], expected, atol=1e-5, rtol=1e-5)
        done = [at + n for at, n in zip(done, counts, strict=True)]
    assert done == lengths


def _order(last: list[int], counts: list[int]) -> list[int]:
    """Span numbers in the order in which their tokens lie in the pass."""
    return sorted(range(len(last)), key=lambda number: last[number] - counts[number])


def test_copied_blocks_hold_the_same() -> None:
    cache = PagedAttention(
        {0: LayerShape(1, 2, 3)}, num_blocks=3, block_size=2, dtype=torch.float32, device=CPU
    )
    cache.pools[0].copy_(torch.arange(40.0).view(4, 2, 1, 5))
    before = cache.pools[0].clone()
    cache.begin(lay_out([(seq([1], [0]), 0, 1)], 2, CPU), [(0, 1), (1, 2)])
    torch.testing.assert_close(cache.pools[0], before[[0, 0, 1, 3]])


def test_capped_scores_and_sinks_are_scored_in_float32_as_the_trainer_does() -> None:
    """In bfloat16 only keys, values and weights are rounded; scores of either side must agree to the last bit or so."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8).bfloat16() * 3 for _ in range(3))
    options = AttentionOptions(scaling=0.35, sinks=torch.randn(2).bfloat16())
    bias = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    paged = _attend(query, key, value, bias.bfloat16(), options)
    packed = causal_attention(query, key, value, options)
    torch.testing.assert_close(paged, packed, atol=0, rtol=0.01)
    assert float((paged != packed).float().mean()) < 0.02
