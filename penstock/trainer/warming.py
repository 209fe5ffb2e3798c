"""A made-up micro-batch, so that compilation is over before the first real one comes."""

from itertools import count

import numpy as np

from penstock.trainer.batch import PackedRow
from penstock.types import NOT_SAMPLED, Sample, SamplingParams, TrainSequence

ANSWERS = (211, 173, 149)
"""Tokens of the answers of a group. The sizes of a row are all different: what is compiled must not take one for
another."""


def made_up_row(vocabulary: int, tokens: int, device: str, *, shared_prompts: bool) -> PackedRow:
    """At most `tokens` long, and not much less, if a group fits: what is compiled for a short row does not serve
    long ones."""
    sequences: list[TrainSequence] = []
    room = tokens
    for group in count():
        prompt = 37 + group % 16
        room -= sum(ANSWERS) + prompt * (1 if shared_prompts else len(ANSWERS))
        if sequences and room < 0:
            break
        sequences += [
            TrainSequence(
                sample=_sample(prompt, answer, vocabulary), group=group, episode=episode, turns=((0, prompt),)
            )
            for episode, answer in enumerate(ANSWERS)
        ]
    row = PackedRow.of(sequences, device, shared_prompts=shared_prompts)
    assert row is not None
    return row


def _sample(prompt: int, answer: int, vocabulary: int) -> Sample:
    """Answers differ from their first token on, so that nothing but the prompt is shared."""
    length = prompt + answer
    ids = np.concatenate([np.arange(prompt), np.arange(answer, answer + answer)]) % vocabulary
    sampled = np.arange(length) >= prompt
    return Sample(
        token_ids=ids.astype(np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        sampling=SamplingParams(max_tokens=answer),
    )
