import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda.kernels import reference  # isort: skip
from penstock.engines.embedded.cuda.kernels.rotary import HEADS, rotate  # isort: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 16), (HEADS, HEADS, 24), (3, 1, 64), (2 * HEADS + 1, 1, 8)]
)
def test_queries_and_keys_are_turned_as_by_hand(heads, kv_heads, dim):
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(5, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE)
    query, key, _ = joined.split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = (torch.randn(5, dim, generator=generator).to(DEVICE) for _ in range(2))
    got = rotate(query, key, cos, sin)
    for turned, x in zip(got, (query, key), strict=True):
        assert turned.is_contiguous()
        torch.testing.assert_close(turned, reference.rotate(x, cos, sin), rtol=1e-5, atol=1e-6)


def test_a_turn_keeps_lengths_and_differences_of_places():
    """Of two vectors at places 3 and 5 the product is that at 0 and 2."""
    angles = torch.arange(8)[:, None] * 0.7 ** torch.arange(4).repeat(2)[None]
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(1)).expand(8, -1, -1).contiguous()
    query, key = rotate(
        x[:, :1].to(DEVICE), x[:, 1:].to(DEVICE), angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    )
    torch.testing.assert_close(query.norm(dim=-1).cpu(), x[:, :1].norm(dim=-1))
    torch.testing.assert_close((query[3] * key[5]).sum(), (query[0] * key[2]).sum())


def test_numbers_of_16_bits_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    query, key = (torch.randn(4, heads, 32, generator=generator).to(half).to(DEVICE) for heads in (4, 2))
    cos, sin = (torch.randn(4, 32, generator=generator).to(half).to(DEVICE) for _ in range(2))
    got, _ = rotate(query, key, cos, sin)
    want = reference.rotate(query.double(), cos.double(), sin.double()).to(half)
    differ = got != want
    assert float(differ.float().mean()) < 0.02  # sums in float32 may fall on the other side of a boundary
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-4)
