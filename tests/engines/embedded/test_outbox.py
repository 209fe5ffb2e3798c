from typing import Any, cast

import numpy as np
import pytest

from penstock.engines.embedded.outbox import Outbox
from penstock.sampling_masks import Packed
from tests.engines.embedded.test_delivery import Letters
from tests.engines.embedded.test_sampler import row

KEPT = Packed([2, 0, 1, 3], np.array([1, 2, 5, 4, 5, 6], dtype=np.int32))
"""Of four tokens."""


@pytest.mark.parametrize(
    ("options", "reason", "count", "words"),
    [
        ({"max_tokens": 9}, None, 4, [1, 2, 5, 4, 5, 6]),
        ({"max_tokens": 3}, "length", 3, [1, 2, 5]),
        ({"max_tokens": 9, "stop": ("ab",)}, "stop", 2, [1, 2]),
        ({"max_tokens": 9, "stop_token_ids": (1,)}, "stop", 1, [1, 2]),
    ],
)
def test_all_that_is_drawn_is_taken_up_to_where_the_sequence_ends(
    options: dict[str, Any], reason: str | None, count: int, words: list[int]
) -> None:
    outbox = Outbox(cast(Any, None), Letters(), vocab_size=320)
    seq = row(record_sampling_mask=True, **options)
    assert outbox.take(seq, [1, 2, 2, 4], [-1.0, -2.0, -3.0, -4.0], [7, 7, 8, 8], KEPT) == reason
    assert seq.num_output == outbox.num_tokens == count
    assert (seq.logprobs, seq.versions) == ([-1.0, -2.0, -3.0, -4.0][:count], [7, 7, 8, 8][:count])
    (kept,) = seq.masks
    assert kept.counts == KEPT.counts[:count]
    assert kept.words.tolist() == words
