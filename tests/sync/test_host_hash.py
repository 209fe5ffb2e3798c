import numpy as np
import pytest

from penstock.sync.host_hash import PIECE, sum_on_host


def test_pieces_do_not_show() -> None:
    bits = np.random.default_rng(0).integers(-(2**15), 2**15, PIECE + 100).astype(np.int16)
    apart = sum_on_host(bits[:77], 3) + sum_on_host(bits[77:], 80)
    assert sum_on_host(bits, 3) == apart % 2**64


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32])
def test_it_is_what_the_definition_says(kind: type[np.integer]) -> None:
    bits = np.array([0, 1, 100, 127], dtype=kind)
    for first in (0, 2**32 - 2):
        expected = 0
        for index, each in enumerate(bits.tolist(), first):
            product = 0x5851F42D * ((each + 0x61C88647 * index + 0x2545F491 * (index >> 32)) % 2**32)
            expected += product % 2**32 * (product >> 32 | 2**31)
        assert sum_on_host(bits, first) == expected % 2**64


def test_nothing_adds_up_to_nothing() -> None:
    assert sum_on_host(np.zeros(0, dtype=np.int16), 7) == 0
