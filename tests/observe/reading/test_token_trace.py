import msgspec
import numpy as np
import pytest

from penstock.observe.reading.token_trace import UNKNOWN, TokenTrace
from tests.observe.examples import TEXTS, TOKENS


def test_columns_of_loss_tokens_are_laid_beside_all_tokens() -> None:
    trace = TokenTrace.of(TOKENS, TEXTS.texts)
    assert trace.texts == ["a", "b", "<script>", "a"]
    assert trace.loss_mask.tolist() == [False, True, True, False]
    assert trace.engine_logprobs.tolist()[1:] == [-1.0, -2.0, -3.0] and np.isnan(trace.engine_logprobs[0])
    assert trace.trainer_logprobs.tolist()[1:3] == [-0.5, -2.75]
    assert trace.ratios.tolist()[1:3] == pytest.approx([np.exp(0.5), np.exp(-0.75)])
    assert trace.clipped.tolist() == [UNKNOWN, 0, 1, UNKNOWN]
    assert np.isnan(trace.advantages[[0, 3]]).all() and trace.advantages.tolist()[1:3] == [1.5, 1.5]
    assert trace.worst == 2


def test_what_the_trainer_did_not_say_is_unknown() -> None:
    bare = msgspec.structs.replace(TOKENS, gaps=b"", advantages=b"", weights=b"", clipped=b"")
    trace = TokenTrace.of(bare, {})
    assert trace.worst is None
    assert trace.texts == ["<7>", "<8>", "<9>", "<7>"]
    assert np.isnan(trace.gaps).all() and trace.clipped.tolist() == [UNKNOWN] * 4
