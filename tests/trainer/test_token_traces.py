import numpy as np
import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.trainer import token_traces
from penstock.trainer.config import TrainerConfig
from penstock.trainer.packing import plan_step
from penstock.trainer.policy_trainer import PolicyTrainer
from tests.trainer.builders import make_groups, tiny_model

GROUPS = make_groups(0, shape=(3, 2))


def traces(asked, **config):
    trainer = PolicyTrainer(
        tiny_model("llama"),
        config=TrainerConfig(**config),
        algorithm=AlgorithmConfig(loss="clip"),
        total_steps=5,
    )
    (plan,) = plan_step(1, GROUPS, micro_batch_tokens=40, shared_prompts=True, traced=asked)
    return trainer.step(plan).traces


def trainers_logprobs(group: int, episode: int) -> np.ndarray:
    """Of the sampled tokens, by a plain forward pass."""
    (sample,) = GROUPS[group].samples(episode)
    with torch.no_grad():
        logits = tiny_model("llama")(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
    logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
    chosen = logprobs.gather(1, torch.from_numpy(sample.token_ids[1:].astype(np.int64))[:, None])[:, 0]
    return chosen.numpy()[sample.loss_mask[1:]]


def test_the_answers_that_are_asked_for_come_with_the_trainers_logprobs() -> None:
    found = {(trace.group, trace.episode): trace for trace in traces(((0, 1), (1, 0)))}
    assert {(0, 1), (1, 0)} <= set(found)
    for (group, episode), trace in found.items():
        (sample,) = GROUPS[group].samples(episode)
        engine = sample.logprobs[sample.loss_mask]
        np.testing.assert_allclose(engine + trace.gaps, trainers_logprobs(group, episode), atol=1e-4)
        assert len(set(trace.advantages.tolist())) == 1
        assert trace.weights.shape == trace.gaps.shape
        assert trace.clipped is not None and set(trace.clipped.tolist()) <= {0.0, 1.0}


def test_the_widest_gap_comes_too() -> None:
    gaps = {
        (group, episode): np.abs(trainers_logprobs(group, episode) - sample.logprobs[sample.loss_mask]).max()
        for group, scored in enumerate(GROUPS)
        for episode in range(len(scored.scores))
        for sample in scored.samples(episode)
    }
    widest = max(gaps, key=lambda place: gaps[place])
    other = min(gaps, key=lambda place: gaps[place])
    assert {(trace.group, trace.episode) for trace in traces((other,))} == {widest, other}
    assert [(trace.group, trace.episode) for trace in traces((widest,))] == [widest]


def test_nothing_is_handed_back_unasked() -> None:
    assert traces(()) == ()


def test_what_is_handed_back_is_bounded(monkeypatch) -> None:
    every = tuple((group, episode) for group in (0, 1) for episode in range((3, 2)[group]))
    assert len(traces(every)) == 5
    monkeypatch.setattr(token_traces, "MAX_TOKENS", 1)
    assert len(traces(every)) == 1
