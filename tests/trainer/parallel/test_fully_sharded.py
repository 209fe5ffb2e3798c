"""The gradient of a step does not depend on how many ranks train it, nor on how its weights are split."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather

from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.losses import LOSSES
from penstock.blob_stores import MemoryBlobs
from penstock.records import ScoredGroup
from penstock.records.routing_records import store_routes
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.forward.checkpointing import compile_layers, compiler_settings
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.parallel.fully_sharded import shard_model
from penstock.trainer.parallel.local_shards import is_split
from penstock.trainer.parallel.process_ranks import leave_ranks
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.packing import plan_step
from tests.models.moe import moe_model
from tests.trainer.builders import tiny_model
from tests.trainer.parallel.layout_gradients import MICRO_BATCH, Case, errors_on_rank, join, trained
from tests.trainer.parallel.rank_processes import on_ranks, rank_device
from tests.trainer.test_algorithms import near_policy
from tests.trainer.test_policy_trainer import SGD

pytestmark = pytest.mark.processes

LOSS_CASES: list[Case] = [({"loss": name}, {}) for name in LOSSES.names()]
OTHER_CASES: list[Case] = [
    ({"advantage": "gae"}, {}),
    ({"loss": "clip", "kl_coef": 0.1}, {}),
    ({"loss": "clip"}, {"checkpointing": "full", "logprob_chunk_tokens": 3}),
    ({"loss": "clip"}, {"checkpointing": "selective", "shared_prompts": False}),
    ({"loss": "clip", "kl_coef": 0.1}, {"gather": "step"}),
]
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"data": 2}, {"shard": 2}, {"context": 2}],
    4: [
        {"data": 4},
        {"data": 2, "shard": 2},
        {"data": 2, "context": 2},
        {"shard": 4},
        {"shard": 2, "context": 2},
        {"context": 4},
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("size", LAYOUTS)
def test_gradients_are_those_of_one_process(size: int) -> None:
    """Of every loss, and the norm that clips them."""
    # Four processes on two cores wait for each other at every collective, so they have fewer of them.
    model = tiny_model("llama", num_hidden_layers=2 if size == 2 else 1)
    groups = near_policy(model, 3, shape=(3, 4, 2))
    cases = [*LOSS_CASES, *OTHER_CASES] if size == 2 else LOSS_CASES
    for found in on_ranks(size, errors_on_rank, LAYOUTS[size], model, groups, cases):
        assert len(found) == len(LAYOUTS[size]) * len(cases)
        assert {case: error for case, error in found.items() if not error <= 1e-5} == {}


def test_tied_embeddings_have_one_gradient() -> None:
    model = tiny_model("qwen3")
    groups = near_policy(model, 5, shape=(3, 1))
    for found in on_ranks(2, errors_on_rank, [{"shard": 2}], model, groups, [({"loss": "clip"}, {})]):
        assert max(found.values()) <= 1e-5


def test_adapters_are_split_too() -> None:
    """On the output embedding too, which the head reads by itself."""
    model = tiny_model("llama")
    groups = near_policy(model, 5, shape=(3, 2))
    lora = {"rank": 4, "targets": ["q_proj", "down_proj", "lm_head"]}
    cases: list[Case] = [({"loss": "clip", "kl_coef": 0.1}, {"lora": lora})]
    for found in on_ranks(
        2, errors_on_rank, [{"shard": 2}, {"data": 2}, {"context": 2}], model, groups, cases
    ):
        assert max(found.values()) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "ernie4.5-moe"])
def test_experts_are_split_as_other_weights(family: str) -> None:
    """Every rank gathers all experts of a layer and runs those that its own tokens chose."""
    model = moe_model(family)
    groups = near_policy(model, 5, shape=(3, 2))
    cases: list[Case] = [({"loss": "gspo"}, {})]
    for found in on_ranks(4, errors_on_rank, [{"data": 2, "shard": 2}, {"data": 4}], model, groups, cases):
        assert max(found.values()) <= 1e-5


def with_routes(model: Any, groups: list[ScoredGroup], blobs: MemoryBlobs) -> list[ScoredGroup]:
    """The first group with random experts for every token, as an engine could have recorded them."""
    routers = PackedModel(copy.deepcopy(model), chunk_tokens=8).routers
    assert routers is not None
    shape, rng = routers.shape, np.random.default_rng(0)
    first, *others = groups
    episodes = []
    for number, episode in enumerate(first.group.episodes):
        (turn,) = episode.turns
        size = (len(turn.prompt_ids) + len(turn.output_ids) - 1, shape.num_layers)
        chosen = rng.random((*size, shape.num_experts)).argsort(axis=-1)[..., : shape.top_k]
        ref = store_routes(blobs, f"group-0/{number}.routes", chosen, shape, start=0)
        episodes.append(
            msgspec.structs.replace(episode, turns=(msgspec.structs.replace(turn, routing=(ref,)),))
        )
    group = msgspec.structs.replace(first.group, episodes=tuple(episodes))
    return [msgspec.structs.replace(first, group=group), *others]


@pytest.mark.parametrize("size", [2, 4])
def test_recorded_experts_are_replayed_on_every_rank(size: int) -> None:
    """One group of several has a record, so some ranks have nothing to replay, and rows that share no prompt: they run
    fillers meanwhile."""
    model, blobs = moe_model("qwen3-moe"), MemoryBlobs()
    groups = near_policy(model, 5, shape=(3, 2, 2))
    routed = with_routes(model, groups, blobs)
    layouts = {2: [{"shard": 2}, {"data": 2}], 4: [{"data": 2, "shard": 2}, {"shard": 4}]}[size]
    case: Case = ({"loss": "gspo", "kl_coef": 0.1}, {"replay_reference": True})
    plans = plan_step(1, routed, ranks=size, micro_batch_tokens=MICRO_BATCH, shared_prompts=True)
    has_routes = [any(s.sample.routing for batch in plan.micro_batches for s in batch) for plan in plans]
    assert set(has_routes) == {False, True}
    (whole,) = plan_step(1, routed, micro_batch_tokens=MICRO_BATCH, shared_prompts=True)
    (plain,) = plan_step(1, groups, micro_batch_tokens=MICRO_BATCH, shared_prompts=True)
    replayed, free = (trained(copy.deepcopy(model), plan, case, blobs=blobs) for plan in (whole, plain))
    assert abs(replayed.norm - free.norm) > 0.01 * free.norm
    for found in on_ranks(size, errors_on_rank, layouts, model, routed, [case], blobs):
        assert len(found) == len(layouts)
        assert max(found.values()) <= 1e-5


def gathered_after_a_step(rank: int, folder: Path, gather: str) -> dict[str, bool]:
    """Whether weights of policy and reference are still whole when they are updated."""
    ranks = join(rank, folder, ParallelConfig(shard=2))
    model, reference = tiny_model("llama"), tiny_model("llama", seed=1)
    trainer = PolicyTrainer(
        model,
        config=TrainerConfig.model_validate({"logprob_gap_warning": 1e3, "gather": gather}),
        algorithm=AlgorithmConfig(kl_coef=0.1),
        total_steps=10,
        reference=reference,
        parallel=ranks,
        device=rank_device(rank),
    )
    found: dict[str, bool] = {}

    class Watching(SGD):
        def update(self, learning_rate: float, norm: float) -> None:
            for name, each in (("policy", model), ("reference", reference)):
                found[name] = any(not is_split(weight) for weight in each.parameters())
            super().update(learning_rate, norm)

    Watching(trainer)
    groups = near_policy(tiny_model("llama"), 3, shape=(3, 2))
    trainer.step(plan_step(1, groups, ranks=2, micro_batch_tokens=MICRO_BATCH)[ranks.layout.plan])
    leave_ranks()
    return found


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_nothing_stays_gathered_until_the_update(gather: str) -> None:
    assert on_ranks(2, gathered_after_a_step, gather) == [{"policy": False, "reference": False}] * 2


def gathers_of_two_steps(rank: int, folder: Path, gather: str) -> tuple[int, int, list[Any]]:
    """How often weights came together, how many micro-batches there were, and the weights after two updates."""
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return foreach_all_gather(*args, **kwargs)

    ranks = join(rank, folder, ParallelConfig(shard=2))
    model = tiny_model("llama")
    trainer = PolicyTrainer(
        model,
        config=TrainerConfig.model_validate(
            {"logprob_gap_warning": 1e3, "learning_rate": 0.01, "gather": gather}
        ),
        algorithm=AlgorithmConfig(),
        total_steps=10,
        parallel=ranks,
        device=rank_device(rank),
    )
    groups = near_policy(tiny_model("llama"), 3, shape=(3, 4, 2))
    num_batches = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
        for number in (1, 2):
            plan = plan_step(number, groups, ranks=2, micro_batch_tokens=MICRO_BATCH)[ranks.layout.plan]
            num_batches += len(plan.micro_batches)
            trainer.step(plan)
    weights = [parameter.full_tensor().detach().cpu().numpy() for parameter in model.parameters()]
    leave_ranks()
    return count, num_batches, weights


def test_weights_that_are_gathered_once_a_step_train_as_those_gathered_for_each_layer() -> None:
    """The second step must see what the first has changed."""
    found = {gather: on_ranks(2, gathers_of_two_steps, gather)[0] for gather in ("layer", "step")}
    (often, num_batches, plain), (seldom, _, kept) = found["layer"], found["step"]
    num_layers = 2
    assert num_batches > 2
    assert (seldom, often) == (2 * (num_layers + 1), num_batches * (2 * num_layers + 1))
    for one, other in zip(plain, kept, strict=True):
        assert np.array_equal(one, other)


def variable_integers(rank: int, folder: Path, splits: bool) -> list[int]:
    """How many integers the compiled code of a layer takes for variables."""
    found = []

    def watching(graph: Any, inputs: Any) -> Any:
        found.append(sum(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward

    ranks = join(rank, folder, ParallelConfig())
    model = tiny_model("llama").to(rank_device(rank))
    if splits:
        shard_model(model, ranks, computes_in=torch.float32)
    compile_layers(model, backend=watching)
    with compiler_settings():
        model(input_ids=torch.arange(9, device=rank_device(rank))[None])
    leave_ranks()
    return found


def test_the_head_dimension_of_a_split_layer_is_compiled_as_a_constant() -> None:
    """As in a layer that is not split: a rotary embedding of a size that might change takes ten times as long."""
    (whole,), (split,) = (on_ranks(1, variable_integers, splits) for splits in (False, True))
    assert whole
    assert split == whole


def gradient_sums(rank: int, folder: Path, computes_in: torch.dtype) -> dict[str, Any]:
    """A backward pass of a split model on a group of one or two ranks, without the trainer."""
    found: dict[str, Any] = {}
    for size in (1, 2):
        if rank >= size:
            continue
        inside = folder / str(size)
        inside.mkdir(exist_ok=True)
        ranks = join(rank, inside, ParallelConfig(shard=size))
        model = tiny_model("llama").to(rank_device(rank))
        ids = torch.arange(8, device=rank_device(rank))[None]
        model(input_ids=ids).logits.sum().backward()
        expected = {name: size * parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        shard_model(model, ranks, computes_in=computes_in)
        model(input_ids=ids).logits.float().sum().backward()
        found[f"{size} factors"] = {
            module._get_fsdp_state()._fsdp_param_group.gradient_divide_factor
            for module in model.modules()
            if isinstance(module, FSDPModule)
        }
        ratios = []
        for name, parameter in model.named_parameters():
            ours, theirs = parameter.grad.full_tensor(), expected[name]
            ratios.append(float((ours * theirs).sum() / theirs.square().sum()))
        found[f"{size} ratios"] = ratios
        leave_ranks()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
def test_gradients_are_summed_and_never_divided(dtype: torch.dtype, tolerance: float) -> None:
    """Of a group of one rank too, where torch would divide twice; in bfloat16 too, where NCCL would give zeros for
    any factor but 1."""
    for found in on_ranks(2, gradient_sums, dtype):
        for name, values in found.items():
            if name.endswith("factors"):
                assert values == {1.0}
            else:
                assert values == pytest.approx([1.0] * len(values), abs=tolerance), name
