import numpy as np
import pytest
import torch

from tests.triton_device import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from penstock.engines.embedded.cuda.kernels import sampling  # isort: skip
from penstock.engines.embedded.cuda.kernels.row_scores import num_turns  # isort: skip
from penstock.engines.embedded.cuda.kernels import truncated_sampling as truncation  # isort: skip

CUTS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (1, 1.0, 0.0),
    (0, 0.7, 0.0),
    (40, 0.9, 0.0),
    (0, 1.0, 0.1),
    (30, 0.95, 0.02),
    (0, 0.9, 0.3),
    (30, 0.6, 0.1),
    (5000, 0.8, 0.0),
    (0, 0.99, 0.01),
]


def make(rows, width, seed=0, scale=2.0):
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.to(DEVICE), torch.arange(rows, device=DEVICE) + 100 * seed


def draw(logits, temperature, seeds, **options):
    return sampling.sample(logits, temperature, seeds, torch.zeros_like(seeds), **options)


def cuts_of(rows):
    top_k, top_p, min_p = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    return sampling.Cuts(top_k.int(), top_p.float(), min_p.float())


def arena_of(rows, vocab, steps=1):
    def zeros(*size):
        return torch.zeros(size, dtype=torch.int32, device=DEVICE)

    return sampling.MaskArena(
        records=torch.ones(rows, dtype=torch.int32, device=DEVICE),
        step=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        words=zeros(rows * steps * sampling.MaskArena.words_per_row(vocab)) - 7,
        cursor=zeros(1),
        sizes=zeros(rows, steps) - 7,
        places=zeros(rows, steps) - 7,
    )


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The ids that a sort leaves, row by row."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    chosen = order[:top_k] if top_k else order
    weights = probs[chosen]
    before = weights.cumsum(0) - weights
    chosen = chosen[before < top_p * weights.sum()] if top_p < 1 else chosen
    return set(chosen[probs[chosen] >= min_p * probs.max()].tolist())


def recorded(arena, row, vocab):
    """The ids that a row of the arena stands for; None when nothing was cut."""
    size, place = int(arena.sizes[row, 0]), int(arena.places[row, 0])
    if size == 0:
        return None
    words = arena.words.cpu().numpy()
    if size > 0:
        return set(words[place : place + size].tolist())
    bits = np.unpackbits(words[place : place + -(-vocab // 32)].view(np.uint8), bitorder="little")
    ids = np.flatnonzero(bits[:vocab])
    assert len(ids) == -size
    return set(ids.tolist())


@pytest.mark.parametrize("scale", [2.0, 0.3])
@pytest.mark.parametrize("candidates", [2048, 64, 2], ids=["among few", "some rows whole", "over whole rows"])
def test_truncation_keeps_what_sorting_keeps_and_writes_it_down(candidates, scale, monkeypatch):
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    monkeypatch.setattr(sampling, "LANES", 256)
    logits, seeds = make(len(CUTS), 700, scale=scale)
    temperature = torch.linspace(0.7, 1.5, len(CUTS)).to(DEVICE)
    arena = arena_of(len(CUTS), 700)
    drawn = draw(logits, temperature, seeds, cuts=cuts_of(CUTS), arena=arena)
    for row, cut in enumerate(CUTS):
        want = kept_by_sorting(logits[row], float(temperature[row]), *cut)
        scaled = logits[row] / temperature[row]
        assert set((scaled >= drawn.thresholds[row]).nonzero()[:, 0].tolist()) == want
        assert int(drawn.num_kept[row]) == len(want)
        assert recorded(arena, row, 700) == (want if len(want) < 700 else None)
        token = int(drawn.tokens[row])
        assert token in want
        normaliser = scaled[sorted(want)].logsumexp(0)
        torch.testing.assert_close(drawn.logprobs[row], scaled[token] - normaliser, atol=1e-5, rtol=1e-5)


UNKNOWN, BAND = truncation.UNKNOWN.value, truncation.BAND.value


def narrowed(logits, cuts, *, lanes=128, candidates=256):
    """Of each row, what it is counted as (candidates, a band, unknown), the ids, and its facts."""
    rows, width = logits.shape
    scores = torch.full((rows, candidates), torch.nan, device=DEVICE)
    ids = torch.full((rows, candidates), -7, dtype=torch.int32, device=DEVICE)
    counts = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
    facts = torch.full((rows, 4), torch.nan, device=DEVICE)
    truncation.narrow_kernel[(rows,)](
        logits, counts, torch.ones(rows, device=DEVICE), cuts.top_k, cuts.top_p, cuts.min_p,
        scores, ids, counts, facts, width, logits.stride(0),
        SOURCES=False, SIZE=lanes, TURNS=num_turns(width, lanes), CANDIDATES=candidates,
    )  # fmt: skip
    top = logits.amax(-1)
    torch.testing.assert_close(facts[:, 0], top)
    torch.testing.assert_close(facts[:, 1], (logits - top[:, None]).exp().sum(-1))
    found = []
    for row, count in enumerate(counts.tolist()):
        kind = min(0, max(count, BAND))
        names = ids[row, : count if kind == 0 else BAND - count if kind == BAND else 0]
        assert torch.equal(scores[row, : len(names)], logits[row, names])
        found.append((kind, names.tolist(), *facts[row, 2:].tolist()))
    return found


def test_candidates_are_few_ascending_and_hold_all_that_is_kept():
    logits, _ = make(4, 3000, scale=4.0)
    cuts = [(0, 0.9, 0.0), (20, 1.0, 0.0), (0, 1.0, 0.1), (0, 0.99, 0.2)]
    for row, (kind, names, _, _) in enumerate(narrowed(logits, cuts_of(cuts))):
        want = kept_by_sorting(logits[row], 1.0, *cuts[row])
        assert kind == 0
        assert names == sorted(names)
        assert want <= set(names)
        assert len(names) <= 3 * len(want) + 10


def test_candidates_where_the_lanes_highest_can_not_tell():
    width = 3000
    crowded = torch.full((width,), -20.0)
    crowded[64 : 64 + 128 * 20 : 128] = 0.0  # twenty equal ones, all seen by one lane
    few = torch.full((width,), -torch.inf)
    few[7::128] = torch.randn(24, generator=torch.Generator().manual_seed(0))
    one = torch.full((width,), -torch.inf)
    one[1234] = 3.0
    logits = torch.stack([crowded, few, one]).to(DEVICE)
    found = narrowed(logits, cuts_of([(0, 0.9, 0.0)] * 3))
    assert [(kind, names) for kind, names, _, _ in found] == [
        (0, list(range(64, 64 + 128 * 20, 128))),
        (0, list(range(7, width, 128))),
        (0, [1234]),
    ]


@pytest.mark.parametrize("top_p", [0.4, 0.9, 0.999])
def test_a_flat_row_is_bracketed_by_a_band_of_few(top_p):
    logits, _ = make(2, 3000, scale=0.5)
    logits[1, ::2] = -torch.inf
    for row, (kind, names, low, above) in enumerate(narrowed(logits, cuts_of([(0, top_p, 0.0)] * 2))):
        want = kept_by_sorting(logits[row], 1.0, 0, top_p, 0.0)
        lowest = float(logits[row, sorted(want)].min())
        assert kind == BAND
        assert len(want) > 256
        assert 0 < len(names) <= 256
        assert names == sorted(names)
        assert low <= lowest
        assert float(logits[row, names].min()) <= lowest <= float(logits[row, names].max())
        higher = logits[row] > logits[row, names].max()
        assert above == pytest.approx(float((logits[row] - logits[row].max()).exp()[higher].sum()), rel=1e-5)


@pytest.mark.parametrize("sources", [False, True])
def test_rounded_flat_rows_keep_what_sorting_keeps(sources, monkeypatch):
    """Scores that lie on the bounds of a band, and bands and whole rows of `sources`."""
    monkeypatch.setattr(sampling, "CANDIDATES", 128)
    monkeypatch.setattr(sampling, "LANES", 64)
    cuts = [(0, 0.9, 0.0), (0, 0.5, 0.0), (0, 1e-6, 0.0), (700, 0.95, 0.0), (0, 0.9, 0.0), (0, 0.99, 0.5)]
    logits, seeds = make(len(cuts), 1000, scale=0.4)
    logits = ((logits * 16).round() / 16).bfloat16()
    order = torch.arange(len(cuts), device=DEVICE).flip(0).int() if sources else None
    ones = torch.ones(len(cuts), device=DEVICE)
    drawn = draw(logits, ones, seeds, cuts=cuts_of(cuts), sources=order)
    for row, cut in enumerate(cuts):
        scores = logits[int(order[row]) if sources else row].float()
        lowest = scores[sorted(kept_by_sorting(scores, 1.0, *cut))].min()
        want = set((scores >= lowest).nonzero()[:, 0].tolist())  # equal ones are kept together
        if cut == (700, 0.95, 0.0):  # the share is of what top-k left, with all that equal its last
            top = set((scores >= scores.topk(700).values[-1]).nonzero()[:, 0].tolist())
            want = kept_by_sorting(scores, 1.0, len(top), 0.95, 0.0)
            want = set((scores >= scores[sorted(want)].min()).nonzero()[:, 0].tolist())
        assert int(drawn.num_kept[row]) == len(want)
        assert int(drawn.tokens[row]) in want


def test_large_scores_lose_nothing():
    logits = torch.full((1, 40), -1e9, device=DEVICE)
    logits[0, 3:8] = -8e3
    drawn = draw(logits, torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(drawn.logprobs.cpu(), -torch.tensor([5.0]).log(), atol=1e-6, rtol=0)


@triton.jit
def copy_kernel(logits, scores, ids, number_at, weight_at, width, low, high, ROOM: tl.constexpr):
    turns = tl.full([4], 9.0, tl.float32)
    number, weight = truncation._copy_out(
        logits, turns, width, 1.0, low, high, 9.0, scores, ids, 16, 4, ROOM
    )  # fmt: skip
    tl.store(number_at, number)
    tl.store(weight_at, weight)


def test_a_band_holds_its_lower_bound_and_not_its_upper():
    logits = (torch.arange(100, device=DEVICE) % 10).float()
    scores, ids = torch.zeros(16, device=DEVICE), torch.zeros(16, dtype=torch.int32, device=DEVICE)
    number, weight = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, device=DEVICE)
    copy_kernel[(1,)](logits, scores, ids, number, weight, 100, 2.0, 5.0, ROOM=16)
    assert int(number) == 30
    assert ids.tolist() == [10 * ten + one for ten in range(10) for one in (2, 3, 4)][:16]
    assert torch.equal(scores, logits[ids.long()])
    assert float(weight) == pytest.approx(10 * float(np.exp([-7.0, -6.0, -5.0]).sum()), rel=1e-5)


def test_rows_without_a_band():
    width = 3000
    whole, _ = make(1, width)
    halves = torch.where(torch.arange(width) % 128 < 60, 0.0, -9.0)
    rows = [torch.zeros(width), whole[0].cpu(), halves, whole[0].cpu() * 0.1, whole[0].cpu() * 0.1]
    cuts = [(0, 0.9, 0.0), (0, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.5), (1500, 0.9, 0.0)]
    found = narrowed(torch.stack(rows).to(DEVICE), cuts_of(cuts))
    assert [(kind, names) for kind, names, _, _ in found] == [(BAND, [])] * 4 + [(UNKNOWN, [])]
    lows = [low for _, _, low, _ in found]
    assert lows[0] == pytest.approx(0.0, abs=1e-5)  # all are equal
    assert lows[1] < -1e29
    assert -9 < lows[2] <= 0
    assert lows[3] == pytest.approx(float(rows[3].max()) + np.log(0.5), abs=1e-5)


def test_rows_that_record_nothing_leave_the_arena_alone():
    logits, seeds = make(2, 300)
    arena = arena_of(2, 300)
    arena.records[0] = 0
    draw(logits, torch.ones(2, device=DEVICE), seeds, cuts=cuts_of([(5, 1.0, 0.0)] * 2), arena=arena)
    assert arena.sizes[:, 0].tolist() == [0, 5]
    assert int(arena.cursor[0]) == 5


def test_equal_scores_are_kept_together():
    logits = torch.zeros(1, 50, device=DEVICE)
    logits[0, 7:10] = 3.0
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    drawn = draw(logits, torch.ones(1, device=DEVICE), zero, cuts=cuts_of([(2, 1.0, 0.0)]))
    assert int(drawn.num_kept[0]) == 3


@pytest.mark.parametrize("cut", [None, (0, 0.95, 0.0)])
def test_draws_follow_the_distribution_within_and_across_groups(cut, monkeypatch):
    monkeypatch.setattr(sampling, "LANES", 4)
    probs = torch.tensor([0.05, 0.2, 0.0, 0.1, 0.02, 0.08, 0.3, 0.05, 0.15, 0.05])
    rows = 200 if cut is None else 60  # the interpreter is slow
    logits = probs.log().expand(rows, -1).contiguous().to(DEVICE)
    seeds = torch.arange(rows, device=DEVICE)
    cuts = None if cut is None else cuts_of([cut] * rows)
    drawn = draw(logits, torch.ones(rows, device=DEVICE), seeds, cuts=cuts)
    if cut is not None:
        probs[4] = 0.0  # the one that may go without breaking up equal ones
        probs /= probs.sum()
    counts = torch.bincount(drawn.tokens.cpu(), minlength=10).double()
    assert counts[probs == 0].sum() == 0
    expected = probs.double() * rows
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[probs > 0].sum()
    assert float(chi_square) < 26.1  # 8 degrees of freedom, one in a thousand
    torch.testing.assert_close(drawn.logprobs.cpu(), probs.log()[drawn.tokens.cpu()], atol=1e-5, rtol=1e-5)


def test_seed_and_place_give_the_same_draw_in_any_batch():
    logits, seeds = make(4, 300)
    temperature = torch.ones(4, device=DEVICE)
    together = draw(logits, temperature, seeds)
    alone = draw(logits[2:3], temperature[:1], seeds[2:3])
    assert int(alone.tokens[0]) == int(together.tokens[2])
    others_are_cut = draw(logits, temperature, seeds, cuts=cuts_of([(3, 1.0, 0.0)] * 2 + [(0, 1.0, 0.0)] * 2))
    assert others_are_cut.tokens[2:].tolist() == together.tokens[2:].tolist()
    by_seed = {int(draw(logits[2:3], temperature[:1], seeds[2:3] + 1000 + i).tokens[0]) for i in range(8)}
    places = torch.arange(8, device=DEVICE)
    same = seeds[2:3].expand(8).contiguous()
    by_place = sampling.sample(
        logits[2:3].expand(8, -1).contiguous(), torch.ones(8, device=DEVICE), same, places
    )
    assert len(by_seed) > 1
    assert len(set(by_place.tokens.tolist())) > 1


def test_several_draws_come_from_one_row_of_logits():
    logits, _ = make(2, 300)
    seeds = torch.tensor([4, 5, 6], device=DEVICE)
    sources = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    ones = torch.ones(3, device=DEVICE)
    for cuts in (None, cuts_of([(20, 1.0, 0.0)] * 3)):
        shared = draw(logits, ones, seeds, sources=sources, cuts=cuts)
        copied = draw(logits[sources.long()].contiguous(), ones, seeds, cuts=cuts)
        assert shared.tokens.tolist() == copied.tokens.tolist()
        torch.testing.assert_close(shared.logprobs, copied.logprobs)


@pytest.mark.parametrize("width", [10, 4096, 5000])
def test_temperature_zero_takes_the_likeliest(width):
    logits, seeds = make(3, width)
    drawn = draw(logits, torch.zeros(3, device=DEVICE), seeds)
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-5, rtol=1e-5)


def test_of_equal_scores_temperature_zero_takes_the_first(monkeypatch):
    monkeypatch.setattr(sampling, "LANES", 16)
    logits = torch.zeros(2, 100, device=DEVICE)
    logits[0, [39, 70, 35]] = 2.0  # 39 and 35 are seen by other lanes than 70, and by later ones
    logits[1, [65, 34]] = 2.0
    drawn = draw(logits, torch.zeros(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert drawn.tokens.tolist() == [35, 34]
