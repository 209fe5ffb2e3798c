"""A made-up micro-batch, so that compilation is over before the first real one comes."""

import numpy as np

from penstock.trainer.batch import PackedRow
from penstock.types import NOT_SAMPLED, Sample, SamplingParams, TrainSequence

GROUPS = ((37, (211, 173, 149)), (53, (191, 127, 89)))
"""Prompt and answers of each group, in tokens. No two sizes are the same: what is compiled must not take one for
another. Together they are long enough for kernels to be made as for rows of any length."""


def made_up_row(vocabulary: int, device: str, *, shared_prompts: bool) -> PackedRow:
    sequences = [
        TrainSequence(
            sample=_sample(prompt, answer, vocabulary), group=group, episode=episode, turns=((0, prompt),)
        )
        for group, (prompt, answers) in enumerate(GROUPS)
        for episode, answer in enumerate(answers)
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
