"""The catalogue inside the trainer: step-wide facts, replayed masks, ages, gaps, value heads."""

import copy
import logging

import msgspec
import numpy as np
import pytest
import torch

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import LOSSES
from penstock.blob_stores import MemoryBlobs
from penstock.records import Group, SamplingParams, ScoredGroup, StepScore
from penstock.records.sampling_masks import fetch_mask, pack_mask, store_mask
from penstock.scoring.functions import load_callable, wrap
from penstock.scoring.reward_calls import score_group
from penstock.trainer.step.packing import plan_step
from tests.trainer.builders import VOCAB, make_groups, tiny_model
from tests.trainer.test_policy_trainer import assert_same, gradients_of, on_policy, trainer_for


def near_policy(model, seed, **options):
    """Groups whose recorded logprobs are the model's own, a little off: ratios around one."""
    groups = on_policy(model, make_groups(seed, **options))
    rng = np.random.default_rng(seed)
    moved = []
    for scored in groups:
        episodes = []
        for episode in scored.group.episodes:
            turn = episode.turns[0]
            noise = rng.normal(0, 0.2, len(turn.logprobs)).astype(np.float32)
            turn = msgspec.structs.replace(turn, logprobs=turn.logprobs + noise)
            episodes.append(msgspec.structs.replace(episode, turns=(turn,)))
        group = msgspec.structs.replace(scored.group, episodes=tuple(episodes))
        moved.append(msgspec.structs.replace(scored, group=group))
    return moved


ALGORITHMS = [
    *({"loss": name} for name in LOSSES.names()),
    *({"advantage": name} for name in ADVANTAGES.names() if name != "pass_at_k"),
    {"advantage": "pass_at_k", "advantage_args": {"k": 2, "threshold": 0.0}},
    {"advantage": "gae"},
    {"advantage": "step_returns"},
    *({"corrections": {name: {}}, "proximal": "start"} for name in CORRECTIONS.names()),
    {"loss": "m2po", "corrections": {"icepop": {}}, "length_norm": "sequence", "entropy_coef": 0.1},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_gradients_do_not_depend_on_the_split(algorithm):
    """Step-wide facts (whitening, M2PO's threshold, values) are of the step, not of the micro-batch."""
    model = tiny_model("llama")
    groups = near_policy(model, 3, shape=(3, 4))
    config = AlgorithmConfig(**algorithm)
    (whole,) = plan_step(1, groups, micro_batch_tokens=10_000)
    (split,) = plan_step(1, groups, micro_batch_tokens=20)
    assert len(split.micro_batches) > 3
    one, expected = gradients_of(copy.deepcopy(model), whole, algorithm=config)
    other, ours = gradients_of(copy.deepcopy(model), split, algorithm=config)
    assert_same(ours, expected)
    for name in ("loss", "ess", "kl", "clip_fraction"):
        assert other[name] == pytest.approx(one[name], abs=1e-5), name


def truncated_rollouts(model, blobs, *, top_p, temperature, seed=0):
    """Groups sampled from the model with top-p, with the ids that were kept, token by token."""
    generator = torch.Generator().manual_seed(seed)
    groups = make_groups(seed, shape=(2, 2))
    params = SamplingParams(temperature=temperature, top_p=top_p)
    fresh = []
    for scored in groups:
        episodes = []
        for episode in scored.group.episodes:
            ids = torch.from_numpy(episode.turns[0].prompt_ids).long()
            prompt = len(ids)
            logprobs, kept = [], []
            for _ in range(12):
                with torch.no_grad():
                    probs = (model(input_ids=ids[None]).logits[0, -1].float() / temperature).softmax(-1)
                ranked, order = probs.sort(descending=True)
                keep = order[: int((ranked.cumsum(0) < top_p).sum()) + 1]
                choice = keep[torch.multinomial(probs[keep], 1, generator=generator)]
                logprobs.append(float((probs[choice] / probs[keep].sum()).log()))
                kept.append(
                    np.sort(keep.numpy()).astype(np.int32) if len(keep) < VOCAB else np.zeros(0, np.int32)
                )
                ids = torch.cat([ids, choice])
            turn = msgspec.structs.replace(
                episode.turns[0],
                output_ids=ids[prompt:].numpy().astype(np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                versions=np.zeros(12, dtype=np.int32),
                sampling=params,
                sampling_masks=(
                    store_mask(blobs, f"a/{len(fresh)}.{len(episodes)}", pack_mask(kept, VOCAB)),
                ),
            )
            episodes.append(msgspec.structs.replace(episode, turns=(turn,)))
        group = msgspec.structs.replace(scored.group, episodes=tuple(episodes))
        fresh.append(msgspec.structs.replace(scored, group=group))
    return fresh


def forms_of(groups, blobs):
    """How the groups' masks are stored."""
    turns = [episode.turns[0] for scored in groups for episode in scored.group.episodes]
    masks = [fetch_mask(blobs, turn.sampling_masks[0]) for turn in turns]
    is_bitmask = np.concatenate([(mask.counts > mask.sizes)[mask.counts > 0] for mask in masks])
    return {"bitmask" if each else "ids" for each in is_bitmask}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("top_p", "temperature", "stored"),
    [(0.99, 1.0, {"bitmask"}), (0.8, 1.0, {"bitmask"}), (0.6, 0.6, {"ids", "bitmask"})],
)
def test_replayed_sampling_masks_make_every_ratio_one(name, top_p, temperature, stored):
    """Same weights: within 1e-4 with the mask, at least ten times further off without it."""
    model = tiny_model(name)
    blobs = MemoryBlobs()
    groups = truncated_rollouts(model, blobs, top_p=top_p, temperature=temperature)
    assert forms_of(groups, blobs) == stored
    (plan,) = plan_step(1, groups, micro_batch_tokens=40)
    replayed, _ = gradients_of(copy.deepcopy(model), plan, blobs=blobs)
    bare = tuple(
        tuple(
            msgspec.structs.replace(s, sample=msgspec.structs.replace(s.sample, sampling_masks=()))
            for s in batch
        )
        for batch in plan.micro_batches
    )
    without, _ = gradients_of(copy.deepcopy(model), msgspec.structs.replace(plan, micro_batches=bare))
    furthest = max(abs(replayed["ratio_max"] - 1), replayed["logprob_gap_max"])
    assert furthest < 1e-4
    assert without["logprob_gap_max"] > 10 * max(furthest, 1e-4)
    assert without["ess"] < replayed["ess"]


def test_metrics_by_age_tell_the_buckets_apart():
    model = tiny_model("llama")
    groups = on_policy(model, make_groups(5, shape=(4,)))
    versions, gaps = (9, 8, 6, 0), (0.0, 0.1, -0.2, 0.5)
    episodes = []
    for episode, version, gap in zip(groups[0].group.episodes, versions, gaps, strict=True):
        turn = episode.turns[0]
        turn = msgspec.structs.replace(
            turn, versions=np.full_like(turn.versions, version), logprobs=turn.logprobs - np.float32(gap)
        )
        episodes.append(msgspec.structs.replace(episode, turns=(turn,)))
    group = msgspec.structs.replace(groups[0].group, episodes=tuple(episodes))
    (plan,) = plan_step(10, [msgspec.structs.replace(groups[0], group=group)], micro_batch_tokens=1000)
    metrics, _ = gradients_of(model, plan)
    for name, gap in zip(("age_0", "age_1", "age_2_3", "age_8_15"), gaps, strict=True):
        assert metrics[f"ratio_p50_{name}"] == pytest.approx(np.exp(gap), rel=1e-4)
        assert metrics[f"kl_{name}"] == pytest.approx(np.exp(gap) - 1 - gap, abs=1e-4)
        assert metrics[f"ess_{name}"] == pytest.approx(1.0, abs=1e-5)
        assert 0 <= metrics[f"clip_fraction_{name}"] <= 1
    assert sum(value for key, value in metrics.items() if key.startswith("tokens_age")) == pytest.approx(1.0)
    assert "ess_age_4_7" not in metrics
    assert metrics["version_spread"] == 9
    assert metrics["ess"] < 0.98


def test_a_wide_training_inference_gap_warns_once_and_is_counted(caplog):
    model = tiny_model("llama")
    (plan,) = plan_step(1, near_policy(model, 6), micro_batch_tokens=1000)
    trainer = trainer_for(model, learning_rate=0.0)
    with caplog.at_level(logging.WARNING):
        first = trainer.step(plan)
        second = trainer.step(msgspec.structs.replace(plan, step=2))
    assert caplog.text.count("differ by") == 1
    assert "sampling masks" in caplog.text
    assert (first.values()["logprob_gap_warnings"], second.values()["logprob_gap_warnings"]) == (1, 2)
    quiet = trainer_for(tiny_model("llama"), logprob_gap_warning=10.0).step(plan)
    assert quiet.values()["logprob_gap_warnings"] == 0


def test_engine_corrections_touch_only_tokens_of_the_current_version():
    model = tiny_model("llama")
    groups = near_policy(model, 7)
    algorithm = AlgorithmConfig(engine_corrections={"icepop": {"low": 0.99, "high": 1.01}})
    fresh, _ = gradients_of(
        copy.deepcopy(model), plan_step(1, groups, micro_batch_tokens=1000)[0], algorithm=algorithm
    )
    stale, _ = gradients_of(
        copy.deepcopy(model), plan_step(2, groups, micro_batch_tokens=1000)[0], algorithm=algorithm
    )
    assert fresh["masked_fraction"] > 0.5
    assert stale["masked_fraction"] == 0


def mixed_versions(groups, mixed_kv=None):
    """The first half of every answer from older weights, under which its logprobs are far off. `mixed_kv` is what the
    engine says of the rest."""
    found = []
    for scored in groups:
        episodes = []
        for episode in scored.group.episodes:
            turn = episode.turns[0]
            half = max(1, len(turn.output_ids) // 2)
            versions = np.array([0] * half + [1] * (len(turn.output_ids) - half), dtype=np.int32)
            mixed = None if mixed_kv is None else (versions == 1) & mixed_kv
            turn = msgspec.structs.replace(turn, versions=versions, mixed=mixed)
            episodes.append(msgspec.structs.replace(episode, turns=(turn,)))
        group = msgspec.structs.replace(scored.group, episodes=tuple(episodes))
        found.append(msgspec.structs.replace(scored, group=group))
    return found


def test_the_engines_gap_is_of_answers_without_older_tokens():
    """Behind older tokens an answer in flight has their keys and values: what differs there is not the engine."""
    model = tiny_model("llama")
    algorithm = AlgorithmConfig(engine_corrections={"icepop": {"low": 0.99, "high": 1.01}})
    groups = near_policy(model, 7, version=1)
    (whole,) = plan_step(2, groups, micro_batch_tokens=1000)
    (mixed,) = plan_step(2, mixed_versions(groups), micro_batch_tokens=1000)
    clean, _ = gradients_of(copy.deepcopy(model), whole, algorithm=algorithm)
    metrics, _ = gradients_of(copy.deepcopy(model), mixed, algorithm=algorithm)
    assert clean["logprob_gap_mean"] > 0.05
    assert metrics["tokens_age_0"] > 0.4
    assert "logprob_gap_mean" not in metrics
    assert (clean["masked_fraction"] > 0.5, metrics["masked_fraction"]) == (True, 0)
    undone = msgspec.structs.replace(
        whole, fresh=()
    )  # of age 0, and sampled by weights that a rollback undid
    metrics, _ = gradients_of(copy.deepcopy(model), undone, algorithm=algorithm)
    assert (metrics["tokens_age_0"], metrics["masked_fraction"]) == (1, 0)
    assert "logprob_gap_mean" not in metrics


def test_the_engines_gap_is_of_tokens_whose_keys_are_of_their_version_where_the_engine_says_so():
    model = tiny_model("llama")
    algorithm = AlgorithmConfig(engine_corrections={"icepop": {"low": 0.99, "high": 1.01}})
    groups = near_policy(model, 7, version=1)

    def metrics_of(groups):
        (plan,) = plan_step(2, groups, micro_batch_tokens=1000)
        return gradients_of(copy.deepcopy(model), plan, algorithm=algorithm)[0]

    again, kept = (metrics_of(mixed_versions(groups, mixed_kv=mixed)) for mixed in (False, True))
    assert again["logprob_gap_mean"] > 0.05
    assert again["masked_fraction"] > 0.2
    assert "logprob_gap_mean" not in kept
    assert kept["masked_fraction"] == 0


@pytest.mark.parametrize("section", ["corrections", "engine_corrections"])
@pytest.mark.parametrize("correction", ["truncated_token", "truncated_sequence", "icepop"])
def test_decoupled_counts_no_gap_twice(correction, section):
    """Its own weight is the whole of π_prox/π_behaviour, so a weight beside it is 1; masks still act."""
    model = tiny_model("llama")
    (plan,) = plan_step(1, near_policy(model, 8), micro_batch_tokens=1000)
    assert plan.fresh
    wide = {"cap": 100.0} if correction != "icepop" else {"low": 0.0, "high": 100.0}
    alone = AlgorithmConfig(loss="decoupled", corrections={})
    _, expected = gradients_of(copy.deepcopy(model), plan, algorithm=alone)
    both = AlgorithmConfig(loss="decoupled", **{"corrections": {}, section: {correction: wide}})
    metrics, grads = gradients_of(copy.deepcopy(model), plan, algorithm=both)
    assert_same(grads, expected)
    assert metrics["correction_weight_mean"] == pytest.approx(1)


def test_corrections_stack():
    model = tiny_model("llama")
    (plan,) = plan_step(4, near_policy(model, 8, version=1), micro_batch_tokens=1000)
    stack = {"truncated_token": {"cap": 1.0}, "version_mask": {"max_age": 1}}
    both, _ = gradients_of(
        copy.deepcopy(model), plan, algorithm=AlgorithmConfig(proximal="start", corrections=stack)
    )
    assert both["masked_fraction"] == 1.0
    assert both["loss"] == 0.0


def test_several_passes_are_relative_to_the_start_of_the_step():
    """With one pass nothing can be clipped; by the last of several the policy has moved."""
    model = tiny_model("llama")
    (plan,) = plan_step(1, on_policy(model, make_groups(9)), micro_batch_tokens=1000)
    algorithm = AlgorithmConfig(loss="decoupled")
    once = trainer_for(copy.deepcopy(model), algorithm=algorithm, learning_rate=1e-2)
    often = trainer_for(copy.deepcopy(model), algorithm=algorithm, learning_rate=1e-2, passes=4)
    assert once.step(plan).values()["clip_fraction"] == 0
    often.step(plan)
    moved = [float((often.weights()[name] - weight).abs().max()) for name, weight in once.weights().items()]
    assert max(moved) > 1e-3
    rows = often._prepare(plan)
    assert rows[0].start is not None


def test_metrics_of_several_passes_by_hand():
    """Weights before pass k are those that k − 1 passes leave. What is clipped and lost is of all passes; drift from
    the policy that sampled, which staleness is judged by, is of the first."""
    model = tiny_model("llama")
    groups = near_policy(model, 9, shape=(4, 3), version=0)
    (plan,) = plan_step(2, groups, micro_batch_tokens=30)
    algorithm = AlgorithmConfig(loss="clip", proximal="start", corrections={})

    def after(passes):
        trainer = trainer_for(
            copy.deepcopy(model), algorithm=algorithm, learning_rate=1e-2, passes=max(1, passes)
        )
        return trainer, trainer.step(plan) if passes else None

    start, _ = after(0)
    rows = start._prepare(plan)
    first = [start._policy(row.row).logprobs.detach() for row in rows]
    losses, clipped, kl, norms = [], [], [], []
    for passes in range(4):
        trainer, result = after(passes)
        if passes:
            norms.append(passes * result.values()["grad_norm"] - sum(norms))
        losses.append(0.0)
        clipped.append([])
        kl.append([])
        for row, old in zip(rows, first, strict=True):
            now = trainer._policy(row.row).logprobs.detach()
            ratio, advantage = (now - old).exp(), row.advantages
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            losses[-1] -= float((surrogate * row.shares).sum())
            clipped[-1] += (((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))).tolist()
            gap = now - row.row.behaviour_logprobs
            kl[-1] += (gap.exp() - 1 - gap).tolist()
    metrics = after(4)[1].values()
    assert clipped[0] == [False] * len(clipped[0]) and np.mean(clipped[3]) > 0.3
    assert metrics["clip_fraction"] == pytest.approx(np.mean(clipped), abs=1e-6)
    assert metrics["clip_fraction_age_1"] == pytest.approx(np.mean(clipped), abs=1e-6)
    assert metrics["clip_fraction_last_pass"] == pytest.approx(np.mean(clipped[3]), abs=1e-6)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["kl"] == pytest.approx(np.mean(kl[0]), rel=1e-4)
    assert metrics["kl_last_pass"] == pytest.approx(np.mean(kl[3]), rel=1e-4)
    assert metrics["num_loss_tokens"] == len(clipped[0])
    assert min(norms) > 0 and norms[0] != pytest.approx(norms[1], rel=0.01)
    assert metrics["grad_norm"] > sum(norms) / 4


def test_a_value_head_learns_returns_and_stays_out_of_the_published_weights():
    model = tiny_model("qwen3")
    groups = on_policy(model, make_groups(10, shape=(4, 4)))
    (plan,) = plan_step(1, groups, micro_batch_tokens=1000)
    algorithm = AlgorithmConfig(loss="clip", advantage="gae", value_coef=1.0, value_clip=10.0)
    trainer = trainer_for(model, algorithm=algorithm, learning_rate=3e-3, dtype="bfloat16")
    assert list(trainer.weights()) == [name for name, _ in model.named_parameters()]
    losses = [
        trainer.step(msgspec.structs.replace(plan, step=step)).values()["value_loss"] for step in range(1, 13)
    ]
    assert losses[-1] < 0.7 * losses[0]
    state = copy.deepcopy(trainer.state_dict())
    other = trainer_for(tiny_model("qwen3"), algorithm=algorithm, learning_rate=3e-3, dtype="bfloat16")
    other.load_state_dict(state)
    later = msgspec.structs.replace(plan, step=13)
    assert other.step(later).values()["value_mean"] == trainer.step(later).values()["value_mean"]


@pytest.mark.parametrize("by_workflow", [False, True])
def test_process_rewards_reach_their_own_tokens(by_workflow: bool):
    """A step that ends after two tokens moves the advantage of those two alone, whether a reward function or the
    episode's workflow has valued it."""
    model = tiny_model("llama")
    groups = on_policy(model, make_groups(11, shape=(2,), max_length=9))
    lengths = [episode.num_output_tokens for episode in groups[0].group.episodes]
    assert min(lengths) > 2
    scores = tuple(
        msgspec.structs.replace(
            score,
            steps=(
                StepScore(turn=0, start=0, end=2, value=value),
                StepScore(turn=0, start=2, end=length, value=0.0),
            ),
        )
        for score, value, length in zip(groups[0].scores, (1.0, -1.0), lengths, strict=True)
    )
    scored = msgspec.structs.replace(groups[0], scores=scores)
    if by_workflow:
        pairs = zip(scored.group.episodes, scores, strict=True)
        own = [msgspec.structs.replace(one, reward=score.value, steps=score.steps) for one, score in pairs]
        group = Group.of(scored.group.number, scored.group.task, own)
        scored = ScoredGroup(group=group, scores=score_group([wrap(load_callable("auto"))], group))
    (plan,) = plan_step(1, [scored], micro_batch_tokens=1000)
    trainer = trainer_for(model, algorithm=AlgorithmConfig(advantage="step_returns"))
    (row,) = trainer._prepare(plan)
    by_sequence = dict(
        zip(
            [s.episode for s in row.row.sequences],
            torch.split(row.advantages, list(row.row.counts)),
            strict=True,
        )
    )
    deviation = np.std([1, 0, -1, 0], ddof=1)
    for episode, sign in ((0, 1), (1, -1)):
        expected = [sign / deviation] * 2 + [0.0] * (lengths[episode] - 2)
        assert by_sequence[episode].tolist() == pytest.approx(expected, abs=1e-5)
