import copy
import json
import logging
import math
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from penstock.algorithms.config import AlgorithmConfig
from penstock.blob_stores import MemoryBlobs
from penstock.errors import BlobLost, Diverged
from penstock.records import SamplingParams, StepPlan, TrainSequence
from penstock.records.sampling_masks import pack_mask, store_mask
from penstock.trainer.checkpoint.state_files import load_state, write_state
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.checkpointing import compile_layers
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.packing import plan_step
from penstock.trainer.step.sharing import forward_length
from penstock.trainer.trained_weights import TrainedWeights
from tests.records.builders import make_sample, with_turns
from tests.trainer.builders import VOCAB, make_groups, tiny_model
from tests.trainer.forward.test_packed_model import make_model

LEARNING_RATE = 0.1
CLIP = {"loss": "clip", "corrections": {}}
"""The loss that the plain loop in these tests writes out."""


class SGD:
    """Reads gradients off a step: the trainer's AdamW is swapped for 'keep the gradient'."""

    def __init__(self, trainer):
        self.gradients = None
        self._optimizer = trainer._optimizer
        trainer._optimizer = self

    def sum_gradients(self, ranks):
        self._optimizer.sum_gradients(ranks)

    def gradient_norm(self, ranks=None):
        self.gradients = {id(p): p.grad.clone() for p in self._optimizer._masters if p.grad is not None}
        return self._optimizer.gradient_norm(ranks)

    def update(self, learning_rate, norm):
        self._optimizer.forget()

    def forget(self):
        self._optimizer.forget()


def trainer_for(model, *, algorithm=None, reference=None, adapter=None, blobs=None, ranks=None, **config):
    return PolicyTrainer(
        model,
        config=TrainerConfig(**config),
        algorithm=algorithm or AlgorithmConfig(**CLIP),
        total_steps=10,
        reference=reference,
        adapter=adapter,
        blobs=blobs,
        ranks=ranks,
    )


def gradients_of(model, plan, **options):
    """Loss and gradients by name that a step computes, with the weights left alone."""
    trainer = trainer_for(model, **options)
    keeper = SGD(trainer)
    result = trainer.step(plan)
    names = {id(p): name for name, p in model.named_parameters()}
    return result.values(), {
        names.get(key, f"extra {place}"): grad for place, (key, grad) in enumerate(keeper.gradients.items())
    }


def reference_loop(model, groups, *, length_norm="token", constant=1024, temperature=1.0, clip=0.2):
    """The plain loop: one padded batch through the ordinary model, a loss written out per sequence."""
    rows, advantages = [], []
    for scored in groups:
        values = np.array([score.value for score in scored.scores])
        normal = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
        for episode, advantage in zip(scored.group.episodes, normal, strict=True):
            rows.append(episode.turns[0])
            advantages.append(float(advantage))
    longest = max(len(t.prompt_ids) + len(t.output_ids) for t in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, turn in enumerate(rows):
        tokens = np.concatenate([turn.prompt_ids, turn.output_ids])
        ids[i, : len(tokens)] = torch.from_numpy(tokens)
        mask[i, : len(tokens)] = 1
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float() / temperature
    logprobs = logits.log_softmax(-1)
    total_tokens = sum(len(turn.output_ids) for turn in rows)
    loss = torch.zeros(())
    for i, (turn, advantage) in enumerate(zip(rows, advantages, strict=True)):
        start = len(turn.prompt_ids)
        per_token = []
        for j, token in enumerate(turn.output_ids):
            ratio = torch.exp(logprobs[i, start + j - 1, int(token)] - float(turn.logprobs[j]))
            ratio = ratio if ratio < 10 else ratio * (10 / ratio.detach())
            per_token.append(-torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage))
        summed = torch.stack(per_token).sum()
        match length_norm:
            case "token":
                loss = loss + summed / total_tokens
            case "sequence":
                loss = loss + summed / len(per_token) / len(rows)
            case "constant":
                loss = loss + summed / constant / len(rows)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def on_policy(model, groups, temperature=1.0):
    """The same groups with the logprobs that the model itself gives, as at max_staleness=0."""

    def scored_by_model(turn):
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.output_ids])).long()[None]
        with torch.no_grad():
            logprobs = (model(input_ids=ids).logits.float()[0] / temperature).log_softmax(-1)
        start = len(turn.prompt_ids)
        at = torch.arange(len(turn.output_ids))
        picked = logprobs[start - 1 + at, torch.from_numpy(turn.output_ids).long()]
        return msgspec.structs.replace(turn, logprobs=picked.numpy())

    return [with_turns(scored, scored_by_model) for scored in groups]


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    scale = max(float(grad.abs().max()) for grad in theirs.values())
    assert scale > 1e-3
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, atol=1e-5 * max(scale, 1.0), rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("length_norm", ["token", "sequence", "constant"])
def test_gradients_equal_a_plain_on_policy_loop(name, length_norm):
    model = tiny_model(name)
    groups = on_policy(model, make_groups(1, temperature=0.8), temperature=0.8)
    algorithm = AlgorithmConfig(**CLIP, length_norm=length_norm, length_constant=7)
    loss, theirs = reference_loop(model, groups, length_norm=length_norm, constant=7, temperature=0.8)
    (plan,) = plan_step(1, groups, micro_batch_tokens=30)
    assert len(plan.micro_batches) > 1
    metrics, ours = gradients_of(copy.deepcopy(model), plan, algorithm=algorithm)
    assert_same(ours, theirs)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["logprob_gap_max"] < 1e-4


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def expected(request):
    model = tiny_model(request.param)
    groups = make_groups(2, shape=(3, 4))
    return model, groups, reference_loop(model, groups)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_gradients_do_not_depend_on_the_split(expected, data):
    """Off-policy logprobs, clipping active; any partition, in any order, into micro-batches."""
    model, groups, (loss, theirs) = expected
    (plan,) = plan_step(1, groups, micro_batch_tokens=10_000)
    sequences = list(data.draw(st.permutations([s for batch in plan.micro_batches for s in batch])))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sequences) - 1))))
    parts = [sequences[a:b] for a, b in zip([0, *cuts], [*cuts, len(sequences)], strict=True)]
    split = msgspec.structs.replace(plan, micro_batches=tuple(tuple(part) for part in parts))
    metrics, ours = gradients_of(copy.deepcopy(model), split)
    assert_same(ours, theirs)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    "options", [{"logprob_chunk_tokens": 3}, {"checkpointing": "full"}, {"checkpointing": "selective"}]
)
def test_memory_options_do_not_change_gradients(options):
    model = tiny_model("gemma2")
    groups = make_groups(3)
    _, theirs = reference_loop(model, groups)
    (plan,) = plan_step(1, groups, micro_batch_tokens=40)
    _, ours = gradients_of(copy.deepcopy(model), plan, **options)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("budget", [24, 10_000])
def test_shared_prompts_change_neither_loss_nor_gradients(name, budget):
    model = tiny_model(name)
    groups = make_groups(3, shape=(3, 4))
    loss, theirs = reference_loop(model, groups)
    (plan,) = plan_step(1, groups, micro_batch_tokens=budget, shared_prompts=True)
    metrics, ours = gradients_of(copy.deepcopy(model), plan, shared_prompts=True)
    assert_same(ours, theirs)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    prompts = [len(group.group.episodes[0].turns[0].prompt_ids) for group in groups]
    if budget == 10_000:
        assert metrics["prompt_tokens_shared"] == 2 * prompts[0] + 3 * prompts[1]
    else:
        assert len(plan.micro_batches) > 2
        assert 0 < metrics["prompt_tokens_shared"] < 2 * prompts[0] + 3 * prompts[1]
    apart, _ = gradients_of(copy.deepcopy(model), plan, shared_prompts=False)
    assert apart["prompt_tokens_shared"] == 0
    assert apart["loss"] == pytest.approx(loss, abs=1e-5)


def test_a_model_that_cannot_share_keeps_the_budget():
    """The plan counted the prompt once; each row is cut again to what really runs."""
    model = make_model("bloom, not behind the interface")
    groups = make_groups(3, shape=(3, 4))
    (plan,) = plan_step(1, groups, micro_batch_tokens=10_000, shared_prompts=True)
    tokens = PackedRow.of(plan.micro_batches[0], shared_prompts=True).input_ids.shape[1]
    (plan,) = plan_step(1, groups, micro_batch_tokens=tokens, shared_prompts=True)
    assert len(plan.micro_batches) == 1
    trainer = trainer_for(model, micro_batch_tokens=tokens)
    rows = [row.row.input_ids.shape[1] for row in trainer._prepare(plan)]
    assert len(rows) == 2
    assert max(rows) <= tokens
    assert sum(rows) == sum(forward_length(s.sample) for s in plan.micro_batches[0])
    assert trainer.step(plan).values()["prompt_tokens_shared"] == 0


def test_perturbed_engine_logprobs_change_the_loss():
    model = tiny_model("llama")
    groups = on_policy(model, make_groups(4))
    (plan,) = plan_step(1, groups, micro_batch_tokens=1000)
    sequences = list(plan.micro_batches[0])
    sample = sequences[0].sample
    moved = msgspec.structs.replace(sample, logprobs=sample.logprobs + np.where(sample.loss_mask, 0.05, 0))
    changed = (msgspec.structs.replace(sequences[0], sample=moved), *sequences[1:])
    before, grads = gradients_of(copy.deepcopy(model), plan)
    after, moved_grads = gradients_of(
        copy.deepcopy(model), msgspec.structs.replace(plan, micro_batches=(tuple(changed),))
    )
    assert abs(after["loss"] - before["loss"]) > 1e-4
    assert after["logprob_gap_max"] == pytest.approx(0.05, abs=1e-4)
    assert any((grads[name] - moved_grads[name]).abs().max() > 1e-4 for name in grads)


def test_late_tokens_that_the_caller_masked_stay_out():
    model = tiny_model("llama")
    groups = make_groups(5, version=3)
    (whole,) = plan_step(6, groups, micro_batch_tokens=1000)

    samples = [
        [
            [s.in_loss_where(np.full(len(s.versions), place == (0, 0))) for s in one.samples()]
            for place, one in (((g, e), one) for e, one in enumerate(group.group.episodes))
        ]
        for g, group in enumerate(groups)
    ]
    (plan,) = plan_step(6, groups, micro_batch_tokens=1000, samples=samples)
    metrics, _ = gradients_of(model, plan)
    only = groups[0].group.episodes[0].num_output_tokens
    assert plan.num_sequences == 1
    assert metrics["num_loss_tokens"] == only == plan.num_loss_tokens
    assert whole.num_loss_tokens > only
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 2.0
    assert "logprob_gap_mean" not in metrics


def test_a_step_learns_and_counts_time():
    model = tiny_model("llama")
    groups = on_policy(model, make_groups(6))
    (plan,) = plan_step(1, groups, micro_batch_tokens=1000)
    trainer = trainer_for(model, learning_rate=1e-2)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    result = trainer.step(plan)
    assert result.step == 1
    assert {"forward", "backward", "optimizer", "prepare"} <= result.seconds.keys()
    assert all(seconds >= 0 for seconds in result.seconds.values())
    weights = trainer.weights()
    assert list(weights) == [name for name, _ in model.named_parameters()]
    assert all(not torch.equal(weights[name], before[name]) for name in weights)
    again = trainer.step(msgspec.structs.replace(plan, step=2))
    assert again.values()["loss"] < result.values()["loss"]


def test_a_step_that_failed_before_its_update_is_undone_and_can_be_made_again():
    model, twin = tiny_model("llama"), tiny_model("llama")
    groups = on_policy(model, make_groups(6))
    (plan,), (small,) = (plan_step(1, groups, micro_batch_tokens=size) for size in (1000, 20))
    trainer, other = trainer_for(model, learning_rate=1e-2), trainer_for(twin, learning_rate=1e-2)

    def fail(grad):
        raise torch.OutOfMemoryError("no room")

    hook = model.get_input_embeddings().weight.register_hook(
        fail
    )  # the last gradient: others are there already
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(plan)
    hook.remove()
    assert trainer.undo_step()
    trainer.step(small)
    other.step(small)
    for name, weight in other.weights().items():
        assert torch.equal(trainer.weights()[name], weight), name
    assert not trainer.undo_step()


@pytest.mark.parametrize("bad", ["score", "weights"])
def test_a_step_that_is_not_finite_leaves_the_weights_alone(bad, caplog):
    model = tiny_model("llama")
    groups = make_groups(7)
    if bad == "score":
        worst = msgspec.structs.replace(groups[0].scores[0], value=math.nan)
        groups[0] = msgspec.structs.replace(groups[0], scores=(worst, *groups[0].scores[1:]))
    (plan,) = plan_step(1, groups, micro_batch_tokens=20)
    trainer = trainer_for(model, learning_rate=1.0)
    if bad == "weights":
        hook = model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    with caplog.at_level(logging.WARNING):
        result = trainer.step(plan)
    assert result.values()["skipped_updates"] == 1
    assert "step 1 skipped" in caplog.text
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())
    if bad == "weights":
        hook.remove()
        later = trainer.step(msgspec.structs.replace(plan, step=2))
        assert later.values()["skipped_updates"] == 1
        assert any(not torch.equal(weight, before[name]) for name, weight in trainer.weights().items())


def test_infinite_recorded_logprobs_do_not_poison_a_step():
    model = tiny_model("llama")
    (plan,) = plan_step(1, make_groups(8), micro_batch_tokens=1000)
    sequences = list(plan.micro_batches[0])
    logprobs = sequences[0].sample.logprobs.copy()
    logprobs[-1] = -np.inf
    sequences[0] = msgspec.structs.replace(
        sequences[0], sample=msgspec.structs.replace(sequences[0].sample, logprobs=logprobs)
    )
    metrics, grads = gradients_of(model, msgspec.structs.replace(plan, micro_batches=(tuple(sequences),)))
    assert metrics["skipped_updates"] == 0
    assert all(torch.isfinite(grad).all() for grad in grads.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_takes_its_sequence_out_and_is_counted(value):
    """As an engine that overflows records them: it must not look like a policy that has not moved."""
    model = tiny_model("llama")
    (plan,) = plan_step(1, on_policy(model, make_groups(8)), micro_batch_tokens=1000)
    first, *others = plan.micro_batches[0]
    logprobs = first.sample.logprobs.copy()
    logprobs[-1] = value
    broken = msgspec.structs.replace(first, sample=msgspec.structs.replace(first.sample, logprobs=logprobs))
    silent = msgspec.structs.replace(
        first, sample=first.sample.in_loss_where(np.zeros(len(logprobs), dtype=bool))
    )
    metrics, grads = gradients_of(
        copy.deepcopy(model), msgspec.structs.replace(plan, micro_batches=((broken, *others),))
    )
    expected, without = gradients_of(
        copy.deepcopy(model), msgspec.structs.replace(plan, micro_batches=((silent, *others),))
    )
    assert metrics["nonfinite_logprobs"] == 1
    assert metrics["num_loss_tokens"] == expected["num_loss_tokens"]
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert_same(grads, without)


def test_updates_that_are_skipped_in_a_row_end_the_run():
    model = tiny_model("llama")
    (plan,) = plan_step(1, make_groups(7), micro_batch_tokens=1000)
    trainer = trainer_for(model, learning_rate=1.0, max_skipped_updates=2)
    hook = model.lm_head.weight.register_hook(lambda grad: grad * math.nan)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    trainer.step(plan)
    hook.remove()
    trainer.step(plan)  # one that works: the count starts again
    after = {name: weight.clone() for name, weight in trainer.weights().items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model.lm_head.weight.register_hook(lambda grad: grad * math.nan)
    trainer.step(plan)
    with pytest.raises(Diverged, match="the last 2 updates were skipped"):
        trainer.step(plan)
    assert all(torch.equal(weight, after[name]) for name, weight in trainer.weights().items())


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}},
     {"min_tokens": 2, "stop_token_ids": (1,)}],
)  # fmt: skip
def test_what_cant_be_replayed_is_not_trained_on(options):
    (plan,) = plan_step(1, make_groups(7), micro_batch_tokens=1000)
    first, *others = plan.micro_batches[0]
    sample = msgspec.structs.replace(first.sample, sampling=SamplingParams(**options))
    plan = msgspec.structs.replace(
        plan, micro_batches=((msgspec.structs.replace(first, sample=sample), *others),)
    )
    with pytest.raises(ValueError, match=f"drawn with {next(iter(options))} can't be trained on"):
        trainer_for(tiny_model("llama")).step(plan)


@pytest.mark.parametrize(
    "options",
    [{"learning_rate": math.inf}, {"learning_rate": 2.0}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)},
     {"max_grad_norm": math.nan}, {"weight_decay": math.inf}, {"weight_decay": 1e10}, {"max_skipped_updates": 0}],
)  # fmt: skip
def test_settings_outside_their_range_are_refused(options):
    with pytest.raises(ValidationError):
        TrainerConfig(**options)


def test_bfloat16_keeps_small_updates_in_the_masters():
    """Updates far below bfloat16's resolution add up in the masters and surface in time."""
    exact, model = tiny_model("llama"), tiny_model("llama")
    (plan,) = plan_step(1, on_policy(exact, make_groups(9)), micro_batch_tokens=1000)
    trainer = trainer_for(model, dtype="bfloat16", learning_rate=2e-5)
    start = {name: weight.clone() for name, weight in trainer.weights().items()}
    assert all(weight.dtype == torch.bfloat16 for weight in start.values())
    weight = "model.layers.0.mlp.up_proj.weight"
    trainer.step(plan)
    after_one = (trainer.weights()[weight] != start[weight]).float().mean()
    for step in range(2, 61):
        trainer.step(msgspec.structs.replace(plan, step=step))
    after_many = (trainer.weights()[weight] != start[weight]).float().mean()
    assert after_one < 0.1
    assert after_many > 0.3


def test_bfloat16_accumulates_gradients_in_float32():
    model = tiny_model("llama")
    groups = make_groups(10, shape=(4, 4, 4))
    (plan,) = plan_step(1, groups, micro_batch_tokens=15)
    _, exact = reference_loop(model, groups)
    trainer = trainer_for(copy.deepcopy(model), dtype="bfloat16")
    keeper = SGD(trainer)
    trainer.step(plan)
    ours = torch.cat([grad.flatten() for grad in keeper.gradients.values()])
    theirs = torch.cat([grad.flatten() for grad in exact.values()])
    assert ours.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.99


def test_reference_kl_is_zero_at_the_reference_and_pulls_back():
    model, reference = tiny_model("llama"), tiny_model("llama")
    other = tiny_model("llama", seed=1)
    (plan,) = plan_step(1, make_groups(11), micro_batch_tokens=30)
    algorithm = AlgorithmConfig(**CLIP, kl_coef=0.5)
    same, _ = gradients_of(model, plan, algorithm=algorithm, reference=reference)
    apart, _ = gradients_of(other, plan, algorithm=algorithm, reference=reference)
    without, _ = gradients_of(tiny_model("llama", seed=1), plan)
    assert same["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert apart["reference_kl"] > 0.1
    assert apart["loss"] - without["loss"] == pytest.approx(0.5 * apart["reference_kl"], rel=1e-4)
    with pytest.raises(ValueError, match="needs a reference model"):
        trainer_for(model, algorithm=algorithm)


def squared(logprobs, reference):
    return (logprobs - reference) ** 2 / 2


def test_a_kl_estimator_of_a_users_own_is_a_penalty_like_ours():
    (plan,) = plan_step(1, make_groups(11), micro_batch_tokens=30)
    (ours, expected), (own, gradients) = (
        gradients_of(
            tiny_model("llama", seed=1),
            plan,
            algorithm=AlgorithmConfig(**CLIP, kl_coef=0.5, kl_estimator=name),
            reference=tiny_model("llama"),
        )
        for name in ("k2", f"{__name__}:squared")
    )
    assert own["reference_kl"] == pytest.approx(ours["reference_kl"])
    assert_same(gradients, expected)


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_saved_model_loads_and_gives_the_same_logits(tmp_path, states):
    trainer = trainer_for(tiny_model("qwen3"), learning_rate=1e-2, optimizer_states=states)
    (plan,) = plan_step(1, make_groups(12), micro_batch_tokens=1000)
    trainer.step(plan)
    trainer.save(tmp_path)
    assert "penstock" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, trainer.weights()[name])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_model_needs_on_the_disk_is_known_before_it_is_saved(tmp_path, dtype):
    trained = TrainedWeights(tiny_model("llama"), None, saved_dtype=dtype)
    trained.save(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < size - trained.saved_bytes < 10_000, "the rest is the file's header"


@pytest.mark.parametrize(
    ("dtype", "states"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "cpu")]
)
def test_a_resumed_trainer_goes_on_as_if_never_stopped(dtype, states):
    options = {
        "dtype": dtype,
        "optimizer_states": states,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_steps": 2,
    }
    (plan,) = plan_step(1, make_groups(13), micro_batch_tokens=1000)
    first = trainer_for(tiny_model("llama"), **options)
    for step in (1, 2, 3):
        first.step(msgspec.structs.replace(plan, step=step))
    state = copy.deepcopy(first.state_dict())
    second = trainer_for(tiny_model("llama", seed=5), **options)
    torch.manual_seed(99)
    second.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), state["random"]["cpu"])
    for trainer in (first, second):
        trainer.step(msgspec.structs.replace(plan, step=4))
    assert first.state_dict()["num_updates"] == second.state_dict()["num_updates"] == 4
    for name, weight in first.weights().items():
        assert torch.equal(weight, second.weights()[name]), name


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_a_checkpoint_is_of_its_moment_and_the_next_update_waits_for_it(tmp_path, states):
    trainer = trainer_for(tiny_model("llama"), learning_rate=1e-2, optimizer_states=states)
    (plan,) = plan_step(1, make_groups(13), micro_batch_tokens=1000)
    assert "checkpoint_stall_ms" not in trainer.step(plan).values()
    state = trainer.checkpoint_state()
    weights = {name: weight.clone() for name, weight in trainer.weights().items()}
    masters = copy.deepcopy(trainer.state_dict()["optimizer"]["masters"])
    assert trainer.step(msgspec.structs.replace(plan, step=2)).values()["checkpoint_stall_ms"] > 0
    assert "checkpoint_stall_ms" not in trainer.step(msgspec.structs.replace(plan, step=3)).values()
    write_state(tmp_path, state.plain, state.tensors)
    loaded = load_state(tmp_path)
    assert loaded["num_updates"] == 1
    for mine, theirs in zip(loaded["optimizer"]["masters"], masters, strict=True):
        assert torch.equal(mine, theirs)
    trainer.trained.write_config(tmp_path)
    trainer.trained.write_weights(tmp_path, state.weights)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in weights.items():
        assert torch.equal(saved.get_parameter(name), weight), name
        assert not torch.equal(trainer.weights()[name], weight), name


def test_temperature_zero_is_refused():
    (plan,) = plan_step(1, make_groups(14, temperature=0.0), micro_batch_tokens=1000)
    with pytest.raises(ValueError, match="temperature 0"):
        trainer_for(tiny_model("llama")).step(plan)


def test_sampling_mask_rows_follow_the_loss_tokens():
    """Kept ids restrict the softmax of exactly their own token, also when earlier tokens are masked."""
    model = tiny_model("llama")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, 8).astype(np.int32)
    kept = [np.array([], dtype=np.int32)] + [
        np.unique(np.append(rng.integers(0, VOCAB, 5), ids[i])).astype(np.int32) for i in range(4, 8)
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0].float()
    logprobs = np.zeros(8, dtype=np.float32)
    for i, keep in zip(range(3, 8), kept, strict=True):
        row = logits[i - 1] if not keep.size else logits[i - 1][torch.from_numpy(keep).long()]
        logprobs[i] = float(logits[i - 1, int(ids[i])] - row.logsumexp(-1))
    blobs = MemoryBlobs()
    parts = [(3, kept[:2]), (5, kept[2:])]
    masks = tuple(
        store_mask(blobs, f"a/{start}", pack_mask(part, VOCAB)).shifted(start) for start, part in parts
    )
    sample = make_sample(
        ids,
        [0, 0, 0, 0, 1, 0, 1, 1],
        logprobs=logprobs,
        versions=[-1, -1, -1, 2, 2, 2, 2, 2],
        sampling=make_groups(0)[0].group.episodes[0].turns[0].sampling,
        sampling_masks=masks,
    )
    plan = StepPlan(
        step=1,
        ages=({2: 0},),
        fresh=(2,),
        scores=make_groups(0)[0].scores[:1] and (make_groups(0)[0].scores,),
        micro_batches=((TrainSequence(sample=sample, group=0, episode=0),),),
        num_loss_tokens=3,
        num_sequences=1,
    )
    metrics, _ = gradients_of(model, plan, blobs=blobs)
    assert metrics["num_loss_tokens"] == 3
    assert metrics["logprob_gap_max"] < 1e-5
    plain = msgspec.structs.replace(sample, sampling_masks=())
    bare = msgspec.structs.replace(plan, micro_batches=((TrainSequence(sample=plain, group=0, episode=0),),))
    assert gradients_of(model, bare)[0]["logprob_gap_max"] > 0.5


def test_a_lost_mask_is_named_and_nothing_is_trained():
    model = tiny_model("llama")
    blobs = MemoryBlobs()
    (scored,) = make_groups(3, shape=(2,))
    sequences = []
    for index, episode in enumerate(scored.group.episodes):
        (sample,) = episode.samples()
        turn = episode.turns[0]
        mask = pack_mask([np.zeros(0, np.int32) for _ in turn.output_ids], VOCAB)
        ref = store_mask(blobs, f"group-{index}/a.mask", mask).shifted(len(turn.prompt_ids))
        sample = msgspec.structs.replace(sample, sampling_masks=(ref,))
        sequences.append(TrainSequence(sample=sample, group=0, episode=index))
    (plan,) = plan_step(1, [scored], micro_batch_tokens=1000)
    plan = msgspec.structs.replace(plan, micro_batches=tuple((sequence,) for sequence in sequences))
    trainer = trainer_for(model, learning_rate=0.1, blobs=blobs)
    blobs.delete("group-1")
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    with pytest.raises(BlobLost, match=r"blob group-1/a\.mask is not in this process"):
        trainer.step(plan)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())


# Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_warm_up_compiles_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(
        "penstock.trainer.forward.packed_model.compile_layers", partial(compile_layers, backend="eager")
    )
    groups = make_groups(8)
    (plan,) = plan_step(1, groups, micro_batch_tokens=1000)
    results = {}
    for warmed in (False, True):
        model = tiny_model("llama")
        trainer = trainer_for(model, learning_rate=1e-2, compile=warmed, micro_batch_tokens=700)
        before = {name: weight.clone() for name, weight in trainer.weights().items()}
        graphs = counters["stats"]["unique_graphs"]
        trainer.warm_up()
        assert (counters["stats"]["unique_graphs"] > graphs) == warmed
        assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        results[warmed] = trainer.step(plan).values()
    assert results[True] == pytest.approx(results[False], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("advantage", "passes"), [("grpo", [True]), ("gae", [False, True])])
def test_a_warm_up_runs_the_passes_that_a_step_will(monkeypatch, advantage, passes):
    """With gradient, and before that without where values at the start of a step are needed."""
    monkeypatch.setattr("penstock.trainer.forward.packed_model.compile_layers", lambda model: None)
    model = tiny_model("llama")
    algorithm = AlgorithmConfig(**CLIP, advantage=advantage)
    trainer = trainer_for(model, algorithm=algorithm, compile=True, micro_batch_tokens=64)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    trainer.warm_up()
    assert seen == passes
