import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.models.attention_options import AttentionOptions
from penstock.trainer.forward.packed_attention import BUCKET_RATIO, BUCKET_SLACK, Layout, PackedAttention


def plain_attention(q, k, v, *, scaling, window=None, softcap=None, sinks=None):
    """One sequence, (heads, length, dim), written out query by query."""
    heads, length, _ = q.shape
    groups = heads // k.shape[0]
    out = torch.zeros(heads, length, v.shape[-1], dtype=q.dtype)
    for h in range(heads):
        for i in range(length):
            first = 0 if window is None else max(0, i - window + 1)
            keys, values = k[h // groups, first : i + 1], v[h // groups, first : i + 1]
            scores = keys @ q[h, i] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h : h + 1]])
            weights = scores.softmax(0)[: len(keys)]
            out[h, i] = weights @ values
    return out


def inputs(lengths, *, heads=4, kv_heads=2, dim=8, value_dim=8, seed=0):
    torch.manual_seed(seed)
    total = sum(lengths)
    make = lambda n, d: torch.randn(1, n, total, d, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return make(heads, dim), make(kv_heads, dim), make(kv_heads, value_dim)


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 3},
    "softcap": {"softcap": 1.5},
    "window and softcap": {"sliding_window": 4, "softcap": 1.5},
    "sinks": {"sinks": True},
    "window and sinks": {"sinks": True, "sliding_window": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("lengths", [[1], [5, 5], [1, 9, 4, 8, 2], [2, 60, 1, 41]])
def test_equals_each_sequence_by_itself_and_so_do_gradients(lengths, options):
    q, k, v = inputs(lengths)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if "sinks" in options else None
    leaves = [q, k, v] + ([sinks] if sinks is not None else [])
    backend = PackedAttention()
    backend.set_lengths(lengths)
    settings_ = {"sliding_window": None, "softcap": None, **options, "sinks": sinks}
    ours = backend(torch.nn.Identity(), q, k, v, AttentionOptions(scaling=0.3, **settings_))
    pieces, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        pieces.append(
            plain_attention(
                q[0, :, part],
                k[0, :, part],
                v[0, :, part],
                scaling=0.3,
                window=settings_["sliding_window"],
                softcap=settings_["softcap"],
                sinks=sinks,
            )
        )
        start += length
    theirs = torch.cat(pieces, dim=1).transpose(0, 1)[None]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    direction = torch.randn_like(theirs)
    for one, other in zip(
        torch.autograd.grad((ours * direction).sum(), leaves),
        torch.autograd.grad((theirs * direction).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_values_may_be_narrower_than_keys():
    q, k, v = inputs([3, 6], value_dim=5)
    backend = PackedAttention()
    backend.set_lengths([3, 6])
    out = backend(torch.nn.Identity(), q, k, v, AttentionOptions(scaling=0.5))
    assert out.shape == (1, 9, 4, 5)
    alone = plain_attention(q[0, :, 3:], k[0, :, 3:], v[0, :, 3:], scaling=0.5)
    torch.testing.assert_close(out[0, 3:].transpose(0, 1), alone)


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_layout_is_a_bijection_with_bounded_padding(lengths):
    layout = Layout.of(lengths)
    total = sum(lengths)
    padded = sum(bucket.rows * bucket.length for bucket in layout.buckets)
    assert sum(bucket.rows for bucket in layout.buckets) == len(lengths)
    for bucket in layout.buckets:
        worst = min(BUCKET_RATIO * bucket.length, bucket.length - BUCKET_SLACK)
        assert bucket.length in lengths
        assert padded <= max(total / BUCKET_RATIO, total + BUCKET_SLACK * len(lengths))
        assert worst <= bucket.length
    if layout.to_packed is None:
        assert padded == total
        return
    assert len(set(layout.to_packed.tolist())) == total
    assert torch.equal(layout.to_padded[layout.to_packed], torch.arange(total))


def test_a_row_of_another_length_is_refused():
    q, k, v = inputs([4])
    backend = PackedAttention()
    for lengths in ([], [5]):
        if lengths:
            backend.set_lengths(lengths)
        with pytest.raises(ValueError, match="call set_lengths"):
            backend(torch.nn.Identity(), q, k, v, AttentionOptions(scaling=1.0))
    with pytest.raises(ValueError, match="numbers >= 1"):
        backend.set_lengths([3, 0])
