from itertools import pairwise

import pytest
import torch

from penstock.models.attention_options import AttentionOptions
from penstock.trainer.forward.packed_attention import PackedAttention
from penstock.trainer.forward.shared_prefixes import SharedPrefixes
from tests.trainer.forward.test_packed_attention import OPTIONS, inputs

LAYOUTS = {
    "one prefix": ([3, 4, 2], [2]),
    "two prefixes and two alone": ([3, 2, 5, 1, 4, 1, 6, 2], [3, 1]),
    "unequal enough for several buckets": ([50, 2, 1, 70, 3], [3]),
}


def test_places_of_a_small_row():
    """aa b | c | A B C, where A and B continue aa and C continues b."""
    shared = SharedPrefixes.of([2, 1, 1, 1, 2, 1], [2, 1])
    assert shared.lengths == (2, 1, 1, 3, 4, 2)
    assert shared.to_repeated.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 5, 6, 2, 7]
    assert shared.to_row.tolist() == [0, 1, 2, 3, 6, 9, 10, 12]


@pytest.mark.parametrize("members", [[3], [1, 2], [2, 0]])
def test_rests_must_fit_the_row(members):
    with pytest.raises(ValueError, match="every prefix is a segment"):
        SharedPrefixes.of([2, 2, 2], members)


def attend(backend, q, k, v, options, sinks):
    options = AttentionOptions(scaling=0.3, **{**options, "sinks": sinks})
    return backend(torch.nn.Identity(), q, k, v, options)


def repeated_attention(q, k, v, lengths, members, options, sinks):
    """Each sequence written out with its prefix, by the packed attention that knows no prefixes; own tokens
    are cut out again by hand."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    places = [list(range(a, b)) for a, b in pairwise(starts)]
    rests = iter(range(len(lengths) - sum(members), len(lengths)))
    rows = places[: len(lengths) - sum(members)]
    cuts = [0] * len(rows)
    for prefix, count in enumerate(members):
        for _ in range(count):
            rows.append(places[prefix] + places[next(rests)])
            cuts.append(lengths[prefix])
    backend = PackedAttention()
    outputs = []
    for row, cut in zip(rows, cuts, strict=True):
        backend.set_lengths([len(row)])
        outputs.append(attend(backend, q[:, :, row], k[:, :, row], v[:, :, row], options, sinks)[:, cut:])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_equals_every_sequence_with_its_own_prefix_and_so_do_gradients(layout, options):
    lengths, members = layout
    q, k, v = inputs(lengths)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if "sinks" in options else None
    leaves = [q, k, v] + ([sinks] if sinks is not None else [])
    backend = PackedAttention()
    backend.set_lengths(lengths, members=members)
    ours = attend(backend, q, k, v, options, sinks)
    theirs = repeated_attention(q, k, v, lengths, members, options, sinks)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    direction = torch.randn_like(theirs)
    for one, other in zip(
        torch.autograd.grad((ours * direction).sum(), leaves),
        torch.autograd.grad((theirs * direction).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def varlen_reference(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """What the flash kernel documents: queries are aligned with the last keys, `left` keys beside the own."""
    left, right = window_size
    assert right == 0
    assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1).double() for tensor in (k, v))
    outputs = []
    for i in range(len(cu_q) - 1):
        queries, keys, values = (
            tensor[int(cu[i]) : int(cu[i + 1])].transpose(0, 1)
            for tensor, cu in ((q.double(), cu_q), (k, cu_k), (v, cu_k))
        )
        num_q, num_k = queries.shape[1], keys.shape[1]
        ahead = torch.arange(num_k)[None] - (torch.arange(num_q)[:, None] + num_k - num_q)
        hidden = (ahead > 0) | ((ahead < -left) if left >= 0 else torch.zeros_like(ahead, dtype=torch.bool))
        scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}], ids=["plain", "window"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_fast_path_hands_the_kernel_the_same_attention(layout, options):
    """The kernel's boundaries and gathered keys, with a reference in its place; half precision as there."""
    lengths, members = layout
    q, k, v = (tensor.detach().bfloat16().requires_grad_() for tensor in inputs(lengths))
    fast = PackedAttention(varlen_reference)
    fast.set_lengths(lengths, members=members)
    ours = attend(fast, q, k, v, options, None)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    theirs = repeated_attention(*exact, lengths, members, options, None)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-2, rtol=1e-2)
    direction = torch.randn_like(theirs)
    for one, other in zip(
        torch.autograd.grad((ours * direction.bfloat16()).sum(), (q, k, v)),
        torch.autograd.grad((theirs * direction).sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2)


def test_gradients_of_a_prefix_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16."""
    row = torch.ones(4, 1, dtype=torch.bfloat16, requires_grad=True)
    repeated = SharedPrefixes.of([1, 1, 1, 1], [3]).repeat(row)
    weights = torch.tensor([256.0, 1, 0, 1, 0, 0, 0])[:, None].bfloat16()
    (repeated * weights).sum().backward()
    assert row.grad[:, 0].tolist() == [258.0, 0, 0, 0]
