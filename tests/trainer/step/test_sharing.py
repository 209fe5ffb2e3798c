import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.records import SamplingParams, TrainSequence
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.step.packing import plan_step
from penstock.trainer.step.sharing import RowLayout, find_families, forward_length
from tests.records.builders import make_sample
from tests.trainer.builders import make_groups, tiny_model
from tests.trainer.forward.test_packed_model import make_model


def sequence(prompt, output, *, group=0, loss=None):
    asked, said = [False] * len(prompt), [True] * len(output) if loss is None else loss
    sample = make_sample(
        [*prompt, *output],
        [*asked, *said],
        logprobs=-1.0,
        versions=[-1] * len(prompt) + [0] * len(output),
        sampling=SamplingParams(temperature=1.0),
    )
    return TrainSequence(sample=sample, group=group, episode=0)


def layout_of(*sequences):
    layout = RowLayout.of(sequences, shared=True)
    return [(part.sequence, part.start, part.stop) for part in layout.segments], layout.members, layout


def test_a_prompt_is_laid_once_before_its_rests():
    segments, members, layout = layout_of(
        sequence([1, 2, 3], [4, 5]), sequence([9], [8, 8], group=1), sequence([1, 2, 3], [6, 5, 4])
    )
    assert segments == [(0, 0, 3), (1, 0, 2), (0, 3, 4), (2, 3, 5)]
    assert members == (2,)
    assert [each.tolist() for each in layout.positions] == [[0, 1, 2, 5], [3, 4], [0, 1, 2, 6, 7]]
    assert layout.num_shared_tokens == 3


def marks(*rows):
    """A row of two experts for each token of a sequence."""
    return [np.array([[mark, 7] for mark in row], dtype=np.int32) for row in rows]


def test_tokens_of_other_experts_run_apart():
    """Of three answers that begin alike, the third has other experts in the prompt, the second from the answer on."""
    alike = [sequence([1, 2], [3, 4, last]) for last in (5, 6, 7)]
    told = marks([0, 1, 2, 3, 9], [0, 1, 5, 3, 9], [0, 6, 2, 3, 9])
    layout = RowLayout.of(alike, shared=True, marks=told)
    parts = [(part.sequence, part.start, part.stop) for part in layout.segments]
    assert parts == [(0, 0, 2), (2, 0, 4), (0, 2, 4), (1, 2, 4)]
    assert (layout.members, layout.num_shared_tokens) == ((2,), 2)
    same = RowLayout.of(alike, shared=True, marks=marks(*[[0, 1, 2, 3, 9]] * 3))
    assert same.segments == RowLayout.of(alike, shared=True).segments


def test_one_member_and_other_prompts_stay_as_they_are():
    segments, members, layout = layout_of(
        sequence([1, 2], [3, 3]), sequence([1, 2], [3, 3], group=1), sequence([7, 2], [3, 3], group=1)
    )
    assert segments == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]
    assert (members, layout.num_shared_tokens) == ((), 0)


def test_only_what_all_begin_with_is_shared():
    """Several turns: the later prompt goes on differently; and an output may begin like the others'."""
    segments, members, _ = layout_of(sequence([1, 2, 3, 4], [5, 5]), sequence([1, 2], [3, 6, 6]))
    assert segments == [(0, 0, 3), (0, 3, 5), (1, 3, 4)]
    assert members == (2,)


def test_a_member_that_is_all_prefix_has_no_rest():
    """Its only loss token is the first of its output, which the prompt's last token predicts."""
    segments, members, layout = layout_of(
        sequence([1, 2], [3]), sequence([1, 2], [4, 5, 6]), sequence([1, 2], [5])
    )
    assert segments == [(0, 0, 2), (1, 2, 4)]
    assert members == (1,)
    assert [each.tolist() for each in layout.positions] == [[0, 1], [0, 1, 2, 3], [0, 1]]
    segments, members, layout = layout_of(sequence([1, 2], [3]), sequence([1, 2], [4]))
    assert segments == [(0, 0, 2)]
    assert members == ()
    assert layout.num_shared_tokens == 2


def test_without_sharing_every_sequence_is_its_own_family():
    families = find_families([sequence([1], [2]), sequence([1], [2])], shared=False)
    assert [(family.members, family.prefix) for family in families] == [((0,), 0), ((1,), 0)]


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(5, 60))
def test_plans_keep_their_denominators_and_the_budget_counts_prompts_once(seed, ranks, budget):
    groups = make_groups(seed, shape=(3, 2, 4))
    apart = plan_step(4, groups, ranks=ranks, micro_batch_tokens=budget)
    plans = plan_step(4, groups, ranks=ranks, micro_batch_tokens=budget, shared_prompts=True)
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    sequences = [s for plan in plans for batch in plan.micro_batches for s in batch]
    assert sorted((s.group, s.episode) for s in sequences) == [
        (g, e) for g, size in enumerate((3, 2, 4)) for e in range(size)
    ]
    longest = max(forward_length(s.sample) for s in sequences)
    for plan, other in zip(plans, apart, strict=True):
        assert (plan.num_loss_tokens, plan.num_sequences) == (other.num_loss_tokens, other.num_sequences)
        for batch in plan.micro_batches:
            layout = RowLayout.of(batch, shared=True)
            tokens = sum(part.stop - part.start for part in layout.segments)
            assert tokens + layout.num_shared_tokens == sum(forward_length(s.sample) for s in batch)
            assert tokens <= max(budget, longest)


def test_a_group_stays_together_until_it_must_be_cut():
    groups = make_groups(3, shape=(4, 4, 4))
    (plan,) = plan_step(1, groups, micro_batch_tokens=60, shared_prompts=True)
    for batch in plan.micro_batches:
        for group in {s.group for s in batch}:
            assert sum(s.group == group for s in batch) == 4
    two = plan_step(1, groups[:1], ranks=2, micro_batch_tokens=1000, shared_prompts=True)
    assert all(plan.micro_batches[0] for plan in two)


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen2": lambda: make_model("qwen2"),
    "gemma2, soft-cap and window": lambda: tiny_model("gemma2"),
    "neox": lambda: make_model("neox"),
    "gpt-oss, with sinks": lambda: make_model("gpt-oss, with sinks"),
}


@pytest.fixture(scope="module", params=MODELS)
def policy(request):
    model = MODELS[request.param]()
    return model, PackedModel(model, chunk_tokens=16)


def outputs_of(model, policy, sequences, direction, *, shared_prompts):
    row = PackedRow.of(sequences, shared_prompts=shared_prompts)
    outputs = policy(row)
    loss = (outputs.logprobs * direction).sum() + outputs.entropy.square().sum() / 10
    return row, outputs.logprobs.detach(), torch.autograd.grad(loss, list(model.parameters()))


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_logprobs_and_gradients_are_those_of_rows_that_repeat_the_prompt(policy, data):
    """Any order, and any cut into rows: a group in two rows lays its prompt in both."""
    model, packed = policy
    groups = make_groups(data.draw(st.integers(0, 99)), shape=(3, 4, 1))
    (plan,) = plan_step(1, groups, micro_batch_tokens=10_000)
    sequences = list(data.draw(st.permutations(plan.micro_batches[0])))
    cut = data.draw(st.integers(1, len(sequences) - 1))
    for part in (sequences[:cut], sequences[cut:]):
        direction = torch.linspace(-1, 1, sum(int(s.sample.loss_mask.sum()) for s in part))
        row, ours, gradients = outputs_of(model, packed, part, direction, shared_prompts=True)
        plain, theirs, expected = outputs_of(model, packed, part, direction, shared_prompts=False)
        assert row.input_ids.shape[1] + row.num_shared_tokens == plain.input_ids.shape[1]
        assert torch.equal(row.targets, plain.targets)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        scale = max(1.0, *(float(gradient.abs().max()) for gradient in expected))
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputation_sees_the_same_prefixes(checkpointing):
    sequences = [sequence([1, 2, 3], [4, 5, 6]), sequence([1, 2, 3], [7]), sequence([1, 2, 3], [8, 9])]
    direction = torch.linspace(-1, 1, 6)
    results = []
    for mode, shared in ((checkpointing, True), ("off", False)):
        model = tiny_model("llama")
        packed = PackedModel(model, chunk_tokens=4, checkpointing=mode)
        results.append(outputs_of(model, packed, sequences, direction, shared_prompts=shared))
    (row, ours, gradients), (_, theirs, expected) = results
    assert (row.lengths, row.members, row.num_shared_tokens) == ((3, 2, 1), (2,), 6)
    assert row.rows.tolist() == [2, 3, 4, 2, 2, 5]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_masked_tokens_and_kept_ids_follow_their_sequences():
    first = sequence([1, 2], [3, 4, 5], loss=[False, True, True])
    second = msgspec.structs.replace(sequence([1, 2], [3, 4, 9], loss=[True, False, True]), episode=1)
    row = PackedRow.of([first, second], shared_prompts=True)
    assert row.lengths == (4,)
    assert row.rows.tolist() == [2, 3, 1, 3]
    assert row.targets.tolist() == [4, 5, 3, 9]
    assert row.segments.tolist() == [0, 0, 1, 1]
