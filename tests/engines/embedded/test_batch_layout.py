import asyncio
import copy

import pytest
import torch

from penstock.engines.embedded import batch_layout as layout
from penstock.engines.embedded.batch_layout import lay_out
from penstock.engines.embedded.sequence import Sequence
from tests.engines.contract import ask
from tests.engines.embedded.test_exact import check_against_plain_forwards
from tests.engines.embedded.test_sampler import row
from tests.engines.embedded.tiny import Driver, make_engine, make_model

CPU = torch.device("cpu")


def seq(tokens: list[int], blocks: list[int]) -> Sequence:
    result = row(prompt=tokens)
    result.blocks = blocks
    return result


def test_tokens_positions_and_slots_of_a_mixed_pass() -> None:
    long = seq([10, 11, 12, 13, 14, 15], [7, 2])
    short = seq([20, 21], [5])
    spans = [(long, 1, 4), (short, 1, 1), (seq([30, 31, 32], [1]), 0, 3)]
    result = lay_out(spans, 4, CPU)
    assert result.input_ids.tolist() == [[21, 30, 31, 32, 11, 12, 13, 14]]
    assert result.positions.tolist() == [[1, 0, 1, 2, 1, 2, 3, 4]]
    assert result.slots.tolist() == [21, 4, 5, 6, 29, 30, 31, 8]
    assert result.last.tolist() == [7, 0, 3]
    assert [(each.start, each.num_tokens, each.rows, each.width) for each in result.rectangles] == [
        (0, 1, 1, 1),
        (1, 3, 1, 3),
        (4, 4, 1, 4),
    ]


def test_ragged_rows_are_padded_and_unpadded() -> None:
    spans = [(seq([1, 2, 3], [0]), 0, 3), (seq([4, 5, 6, 7], [3]), 0, 4)]
    (rectangle,) = lay_out(spans, 4, CPU).rectangles
    assert (rectangle.rows, rectangle.width, rectangle.num_keys) == (2, 4, 4)
    assert rectangle.gather is not None
    assert rectangle.scatter is not None
    assert rectangle.gather.tolist() == [0, 1, 2, 2, 3, 4, 5, 6]
    assert rectangle.scatter.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert rectangle.query_positions.tolist() == [[0, 1, 2, 2], [0, 1, 2, 3]]


def test_a_query_sees_the_past_within_its_window() -> None:
    (rectangle,) = lay_out([(seq([1, 2, 3, 4, 5], [0, 1]), 3, 1)], 4, CPU).rectangles
    visible = rectangle.bias(None, 2, torch.float32) == 0
    assert visible.tolist() == [[[[True] * 4]]]
    assert (rectangle.bias(2, 2, torch.float32) == 0).tolist() == [[[[False, False, True, True]]]]
    (wide,) = lay_out([(seq([1, 2, 3], [0]), 1, 2)], 4, CPU).rectangles
    bias = wide.bias(None, 2, torch.float32)
    assert (bias == 0).tolist() == [[[[True, True, False, False], [True, True, True, False]] * 2]]
    assert wide.bias(None, 2, torch.float32) is bias


@pytest.mark.parametrize("split_above", [0, 10**9])
def test_sequences_of_unlike_length_may_be_kept_apart(
    split_above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SPLIT_ABOVE", split_above)
    spans = [(seq(list(range(n)), list(range(9))), n - 1, 1) for n in (2, 30, 5, 31)]
    rectangles = lay_out(spans, 4, CPU).rectangles
    assert [each.rows for each in rectangles] == ([1, 1, 2] if split_above == 0 else [4])
    reference = make_model("gemma2")

    async def main() -> None:
        driver = Driver(make_engine(copy.deepcopy(reference)))
        for number, length in enumerate((1, 40, 9, 22)):
            await driver.start(ask(str(number), list(range(length)), max_tokens=12, seed=number))
        await driver.drain()
        assert len(driver.finished()) == 4
        check_against_plain_forwards(driver, reference)

    asyncio.run(main())
