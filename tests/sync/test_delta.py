import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.sync.delta import decode, encode


def apply(base: torch.Tensor, new: torch.Tensor, width: int) -> tuple[str, int, torch.Tensor]:
    """The form that was chosen, its size, and what a receiver makes of it and its base."""
    encoding, payload = encode(new, base, width=width)
    if payload is None:
        return encoding, new.numel(), new
    change = decode(encoding, payload, width=width, num_bytes=new.numel())
    units = base.numpy().copy().view(change.bits.dtype)
    units[slice(None) if change.places is None else change.places] ^= change.bits
    return encoding, len(payload), torch.from_numpy(units.view(np.uint8))


@settings(max_examples=200, deadline=None)
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    num_units=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.0]),
    bits=st.sampled_from([1, 7, 64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_come_back(width: int, num_units: int, share: float, bits: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    kind = np.dtype(f"u{width}")
    base = random.integers(0, 2 ** min(8 * width, 63), num_units).astype(kind)
    change = random.integers(0, 2 ** min(bits, 8 * width, 63), num_units).astype(kind)
    new = base ^ np.where(random.random(num_units) < share, change, kind.type(0))
    both = [torch.from_numpy(each.view(np.uint8).copy()) for each in (base, new)]
    _, size, found = apply(*both, width)
    assert torch.equal(found, both[1])
    assert size <= both[1].numel()


def test_nothing_changed_is_nothing_to_send() -> None:
    same = torch.arange(200, dtype=torch.uint8)
    assert apply(same, same.clone(), 2)[:2] == ("sparse", 0)


@pytest.mark.parametrize("places", [[0], [254], [255], [256], [509, 510, 511, 1499], [1499]])
def test_gaps_of_any_length(places: list[int]) -> None:
    base = torch.zeros(3000, dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[places] = 3
    encoding, _, found = apply(base, new, 2)
    assert (encoding, found.tolist()) == ("sparse", new.tolist())


def test_the_smallest_form_is_taken() -> None:
    random = np.random.default_rng(0)
    base = torch.from_numpy(random.integers(0, 256, 1 << 16).astype(np.uint8))
    few, most, all_ = base.clone(), base.clone(), base.clone()
    few.view(torch.int16)[::50] ^= 1
    steps = 2 ** random.geometric(0.5, 1 << 15).clip(1, 15) - 1
    most.view(torch.int16).bitwise_xor_(torch.from_numpy(steps.astype(np.int16)))
    all_.random_(generator=torch.Generator().manual_seed(0))
    assert [apply(base, new, 2)[0] for new in (few, most, all_)] == ["sparse", "xor", "dense"]


def test_twenty_steps_of_adamw_cost_a_fifth_at_most() -> None:
    """bfloat16 on the way, a learning rate of 1e-6, and a gradient in every place; indices included."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1 << 16, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([weight], lr=1e-6)
    start = weight.detach().bfloat16().view(torch.uint8).clone()
    for _ in range(20):
        before = weight.detach().bfloat16().view(torch.uint8).clone()
        weight.grad = torch.randn(1 << 16, generator=generator)
        optimizer.step()
    end = weight.detach().bfloat16().view(torch.uint8)
    for base, most in ((before, 0.02), (start, 0.1)):  # the last step alone; all twenty at once
        _, size, found = apply(base, end, 2)
        assert torch.equal(found, end)
        assert size / end.numel() < most


def test_a_damaged_payload_is_refused() -> None:
    base = torch.zeros(2000, dtype=torch.uint8)
    new = base.clone()
    new[::40] = 9
    encoding, payload = encode(new, base, width=2)
    assert payload is not None
    for damaged in (payload[:-5], payload[5:], np.zeros(30, dtype=np.uint8)):
        with pytest.raises(PenstockError, match="can't be decoded .*; it was cut or damaged"):
            decode(encoding, damaged, width=2, num_bytes=2000)
    with pytest.raises(PenstockError, match="can't be decoded"):
        decode(encoding, payload, width=2, num_bytes=1000)
    with pytest.raises(PenstockError, match="can't be decoded"):
        decode("xor", payload, width=2, num_bytes=2000)
