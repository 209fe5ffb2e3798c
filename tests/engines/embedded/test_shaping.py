import torch
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.engines.embedded.shaping import shape_logits
from tests.engines.embedded.test_sampler import row


def test_plain_requests_leave_the_logits_alone() -> None:
    logits = torch.randn(2, 9)
    assert shape_logits(logits, [row(), row(temperature=0.3)]) is logits


def test_bias_is_added_to_its_tokens() -> None:
    logits = torch.zeros(2, 4)
    result = shape_logits(logits, [row(logit_bias={1: 2.5, 3: -1.0}), row()])
    assert result.tolist() == [[0, 2.5, 0, -1.0], [0, 0, 0, 0]]
    assert logits.sum() == 0


def test_repetition_counts_prompt_and_output_as_transformers_does() -> None:
    logits = torch.randn(1, 12)
    result = shape_logits(logits, [row(prompt=[1, 2, 2], output=[7], repetition_penalty=1.7)])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 7]]), logits.clone())
    torch.testing.assert_close(result, expected)


def test_presence_counts_output_only_and_once() -> None:
    logits = torch.zeros(3, 5)
    result = shape_logits(
        logits,
        [
            row(prompt=[0, 1], output=[2, 2, 4], presence_penalty=0.5),
            row(prompt=[0, 1], output=[], presence_penalty=0.5),
            row(prompt=[0, 1], output=[3], presence_penalty=-2.0),
        ],
    )
    assert result.tolist() == [[0, 0, -0.5, 0, -0.5], [0] * 5, [0, 0, 0, 2.0, 0]]


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    logits = torch.zeros(2, 4)
    options = {"min_tokens": 2, "stop_token_ids": (1, 3)}
    result = shape_logits(logits, [row(output=[0], **options), row(output=[0, 0], **options)])
    assert result.tolist() == [[0, -torch.inf, 0, -torch.inf], [0, 0, 0, 0]]
