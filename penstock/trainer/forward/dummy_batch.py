"""Makes a dummy batch, with which the trainer compiles before the first real micro-batch comes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.models.tokenizer import max_positions
from penstock.records import SamplingParams, TrainSequence, Turn, sample_of_turn
from penstock.trainer.forward.packed_row import PackedRow

PROMPT, ANSWERS = 37, (211, 173, 149)
"""Tokens of the first group; prompts of the others are a little longer. All sizes of a row differ, so that the
compiler can't assume that two of them are equal."""


FILLER_TOKENS = 16


def filler(model: Any, device: str) -> PackedRow:
    """Make a short row, for a rank that has fewer rows than others."""
    vocabulary = model.get_input_embeddings().num_embeddings
    longest = max_positions(model.config)
    return dummy_batch(vocabulary, FILLER_TOKENS, device, longest=longest, shared_prompts=False)


def dummy_batch(
    vocabulary: int, tokens: int, device: str, *, longest: int, shared_prompts: bool
) -> PackedRow:
    """Make a row of this many tokens out of sequences of at most `longest`. It is as long as a real row, because
    code that was compiled for a short row does not serve long ones."""
    scale = min(1.0, longest / 512, tokens / 1024)
    answers = [max(2, int(scale * answer)) for answer in ANSWERS]
    sequences: list[TrainSequence] = []
    room = tokens
    for group, prompt in enumerate(_prompts(scale)):
        # The last token of a sequence is predicted but does not run through the model.
        cost = sum(answers) - len(answers) + prompt * (1 if shared_prompts else len(answers))
        if cost > room:
            break
        room -= cost
        sequences += [
            _sequence(group, episode, prompt, answer, vocabulary) for episode, answer in enumerate(answers)
        ]
    while room > 0 or not sequences:
        length = max(1, min(room, longest - 1))
        sequences.append(_sequence(len(sequences), 0, 1, length, vocabulary))
        room -= length
    row = PackedRow.of(sequences, device, shared_prompts=shared_prompts)
    assert row is not None
    return row


def _prompts(scale: float) -> Iterator[int]:
    while True:
        yield from (max(1, int(scale * (PROMPT + more))) for more in range(16))


def dummy_turn(prompt_ids: np.ndarray, output_ids: np.ndarray, vocabulary: int) -> Turn:
    """Make a turn with the logprobs of a uniform policy."""
    return Turn(
        prompt_ids=prompt_ids.astype(np.int32),
        output_ids=output_ids.astype(np.int32),
        logprobs=np.full(len(output_ids), -np.log(vocabulary), dtype=np.float32),
        versions=np.zeros(len(output_ids), dtype=np.int32),
        finish_reason="stop",
        sampling=SamplingParams(max_tokens=len(output_ids)),
        text="",
    )


def _sequence(group: int, episode: int, prompt: int, answer: int, vocabulary: int) -> TrainSequence:
    """Make a sequence. The answers of a group differ from their first token on, so that they share only the
    prompt."""
    answer_ids = np.arange(episode, episode + answer) % vocabulary
    turn = dummy_turn(np.arange(prompt) % vocabulary, answer_ids, vocabulary)
    return TrainSequence(sample=sample_of_turn(turn), group=group, episode=episode)
