"""The GPU shared out from injected numbers: what fits, what is left, and what an error says."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import UserError
from penstock.models.outline import Outline
from penstock.placement.gpus import Gpu
from penstock.placement.memory_plan import (
    estimate_trainer,
    plan_memory,
    published_bytes,
    rank_bytes,
    ranks_have_room,
)

QWEN = Outline(
    num_parameters=1_543_714_304,
    num_layers=28,
    hidden=1536,
    queries=1536,
    keys=256,
    intermediate=8960,
    vocabulary=151936,
)
GB = 10**9
H200 = Gpu(name="H200", total_bytes=150 * GB, free_bytes=149 * GB)
MIDDLE = Gpu(name="middle", total_bytes=40 * GB, free_bytes=39 * GB)
SMALL = Gpu(name="small", total_bytes=24 * GB, free_bytes=23 * GB)
TINY = Gpu(name="tiny", total_bytes=16 * GB, free_bytes=15 * GB)


def config_of(**sections: dict[str, Any]) -> PenstockConfig:
    base: dict[str, dict[str, Any]] = {
        "engine": {"dtype": "bfloat16", "embedded": {"max_batch": 512}},
        "trainer": {"dtype": "bfloat16", "checkpointing": "selective", "micro_batch_tokens": 8192},
        "sync": {"transport": "cuda_ipc"},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    merged["engine"]["embedded"] = base["engine"]["embedded"] | merged["engine"].get("embedded", {})
    return build(PenstockConfig, merged)


def plan(*gpus: Gpu, **sections: dict[str, Any]) -> Any:
    return plan_memory(config_of(**sections), QWEN, gpus, longest=1000)


@pytest.mark.parametrize(("checkpointing", "measured_gb"), [("selective", 43.0), ("full", 12.0 + 18.5)])
def test_the_plan_covers_what_was_measured(checkpointing: str, measured_gb: float) -> None:
    """Peaks of `bench train` at 16,384 tokens, in docs/performance.md, with masters and AdamW's states. They are of
    one micro-batch: a second one finds the gradients of the first, 6.2 GB."""
    section = {"micro_batch_tokens": 16384, "logprob_chunk_tokens": 4096, "checkpointing": checkpointing}
    needed = plan(H200, trainer=section).trainer / GB
    assert measured_gb < needed < 1.03 * (measured_gb + 6.2)


def test_a_reference_and_long_sequences_cost_memory() -> None:
    plain = estimate_trainer(config_of(), QWEN, longest=1000)
    with_reference = estimate_trainer(config_of(algorithm={"kl_coef": 0.1}), QWEN, longest=1000)
    assert with_reference.total - plain.total == 4 * QWEN.num_parameters
    assert estimate_trainer(config_of(), QWEN, longest=16384).activations == 2 * plain.activations


def test_optimizer_states_take_what_is_asked_for() -> None:
    needed = {
        mode: plan(H200, trainer={"optimizer_states": mode}).trainer for mode in ("float32", "8bit", "cpu")
    }
    assert needed["float32"] - needed["8bit"] == pytest.approx((8 - 2 - 8 / 256) * QWEN.num_parameters, abs=1)
    assert needed["float32"] - needed["cpu"] == 12 * QWEN.num_parameters


def test_snapshots_lie_on_the_gpu_only_over_cuda_ipc() -> None:
    assert published_bytes(config_of(), QWEN) == 2 * 2 * QWEN.num_parameters
    assert published_bytes(config_of(sync={"transport": "shared_memory"}), QWEN) == 0


def test_an_adapter_needs_states_for_itself_alone() -> None:
    """Gradients, masters and moments are the adapter's; the model's weights are held once, and never in float32."""
    size = 18_464_768
    adapted = replace(QWEN, num_adapter_parameters=size, is_head_trained=False)
    found = estimate_trainer(config_of(algorithm={"kl_coef": 0.1}), adapted, longest=1000)
    assert found.weights == 2 * (QWEN.num_parameters + size)
    assert found.gradients == found.masters == 4 * size
    assert (found.moments, found.reference) == (8 * size, 0)
    assert found.loading == found.weights + found.masters
    logits = 1024 * QWEN.vocabulary * 6
    assert found.head == logits + 3 * 8192 * QWEN.hidden * 2
    on_head = estimate_trainer(config_of(), replace(adapted, is_head_trained=True), longest=1000)
    assert on_head.head - found.head == 6 * QWEN.vocabulary * QWEN.hidden
    on_host = config_of(trainer={"dtype": "bfloat16", "optimizer_states": "cpu"})
    assert estimate_trainer(on_host, adapted, longest=1000).moments == 0
    assert published_bytes(config_of(), adapted) == 2 * QWEN.num_parameters + 2 * 2 * size


def test_engines_keep_room_for_adapters() -> None:
    size = 18_464_768
    adapted = replace(QWEN, num_adapter_parameters=size)

    def cache(outline: Outline, **embedded: Any) -> int:
        config = config_of(engine={"device": "cuda:1", "dtype": "bfloat16", "embedded": embedded})
        shared = plan_memory(config, outline, [H200, H200], longest=1000)
        assert shared is not None
        return shared.cache

    plain = cache(QWEN)
    assert (
        plain - cache(adapted, max_adapters=1) == 2 * 2 * size
    )  # one that is served, and a place for the next
    assert plain - cache(adapted, max_adapters=4) == 2 * 5 * size
    assert plain - cache(adapted, max_adapters=1, adapters="merged") == 2 * (QWEN.num_parameters + size)


def test_beside_the_trainer_the_engine_gets_what_is_left() -> None:
    shared = plan(H200)
    margin = int(0.03 * 150 * GB)
    assert shared.engine == 149 * GB - margin - shared.trainer - shared.published
    assert 0.6 < shared.memory_share < 0.75
    # 512 sequences of 4,096 tokens fit beside full fine-tuning, which is a target of this project.
    assert shared.cache // shared.kv_bytes_per_token > 512 * 4096
    assert str(shared).startswith("memory of H200 (150.0 GB): trainer about ")
    two = plan(H200, engine={"count": 2})
    assert two.engine == shared.engine // 2


def test_alone_on_a_gpu_engines_take_nine_tenths() -> None:
    apart = plan(H200, H200, model={"device": "cuda:1"}, engine={"device": "cuda:0"})
    assert (apart.trainer, apart.published, apart.memory_share) == (0, 0, 0.9)
    assert plan(H200, engine={"embedded": {"memory_share": 0.25}}).memory_share == 0.25
    assert plan(H200, engine={"kind": "vllm", "vllm": {"memory_share": 0.25}}).memory_share == 0.25
    open_share = plan(H200).memory_share
    assert plan(H200, engine={"kind": "vllm", "vllm": {"max_batch": 512}}).memory_share == open_share
    assert plan(H200, engine={"embedded": {"kv_tokens": 1000}}).cache == 1000 * 2 * 14336
    words = "memory of H200 (150.0 GB): trainer about 43.9 GB, on a GPU of its own; engine at most 135.0 GB, with a"
    assert str(apart).startswith(words)


def test_nothing_is_planned_without_a_gpu() -> None:
    assert plan() is None
    assert plan(H200, model={"device": "cpu"}) is None


@pytest.mark.parametrize(
    ("gpus", "sections", "message"),
    [
        (
            (SMALL,),
            {},
            r"^the trainer needs about 3\d\.\d GB and published weights 6\.2 GB, and of the 24\.0 GB of small "
            r"22\.3 GB can be used; 27\.8 GB of it are weights, gradients and AdamW's states: set "
            r"trainer\.optimizer_states=8bit or cpu, or split them over more GPUs \(trainer\.parallel\.shard above 1\), or "
            r"take a smaller model$",
        ),
        (
            (TINY,),
            {},
            r"of the 16\.0 GB of tiny 14\.5 GB can be used; 27\.8 GB of it are weights, gradients and AdamW's "
            r"states: set trainer\.optimizer_states=cpu, or split them over more GPUs \(trainer\.parallel\.shard above 1\), or "
            r"take a smaller model$",
        ),
        (
            (TINY,),
            {"trainer": {"optimizer_states": "cpu", "dtype": "float32"}, "algorithm": {"kl_coef": 0.1}},
            r"18\.5 GB of it are weights, gradients and AdamW's states: split them over more GPUs \(trainer\.parallel\.shard "
            r"above 1\), or take a smaller model$",
        ),
        (
            (MIDDLE,),
            {},
            r"^the trainer needs about 3\d\.\d GB and published weights 6\.2 GB, and of the 40\.0 GB of middle "
            r"37\.8 GB can be used; set trainer\.optimizer_states=8bit or cpu or trainer\.checkpointing=full or "
            r"trainer\.micro_batch_tokens below 8192 or sync\.slots=1 or trainer\.parallel\.shard above 1$",
        ),
        (
            (SMALL,),
            {"trainer": {"optimizer_states": "8bit"}},
            r"22\.3 GB can be used; set trainer\.optimizer_states=cpu or trainer\.checkpointing=full or",
        ),
        (
            (H200,),
            {"engine": {"embedded": {"memory_share": 0.8}}},
            r"^engine\.embedded\.memory_share must be at most 0\.6\d beside the trainer's 3\d\.\d GB and published weights "
            r"6\.2 GB on H200 \(150\.0 GB, 149\.0 GB of it free\), got 0\.8; lower it, or set trainer\.",
        ),
        (
            (H200,),
            {"engine": {"embedded": {"kv_tokens": 10_000_000}}},
            r"^an engine needs 29\d\.\d GB \(3\.1 GB of weights, a workspace, and 286\.7 GB for the cache that "
            r"engine\.embedded\.kv_tokens asks for\), and may take 10\d\.\d GB beside the trainer's .*; lower "
            r"engine\.embedded\.kv_tokens or set engine\.embedded\.max_batch below 512, or set trainer\.",
        ),
        (
            (H200,),
            {"engine": {"embedded": {"memory_share": 0.03}}},
            r"for a cache for one sequence of 1000 tokens\), and may take 4\.5 GB .*; raise engine\.embedded\.memory_share or",
        ),
        (
            (H200,),
            {"engine": {"kind": "vllm", "vllm": {"memory_share": 0.8}}},
            r"^engine\.vllm\.memory_share must be at most 0\.6\d beside",
        ),
        (
            (SMALL, H200),
            {"model": {"device": "cuda:1"}, "engine": {"device": "cuda:0", "dtype": "float32", "count": 6}},
            r"on small \(24\.0 GB, 23\.0 GB of it free\); set engine\.dtype=bfloat16 or set engine\.count below 6 or "
            r"set engine\.embedded\.max_batch below 512$",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_settings(
    gpus: tuple[Gpu, ...], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan(*gpus, **sections)


def test_an_engine_keeps_room_for_the_update_that_it_stages() -> None:
    config = config_of()
    sync = config.sync.model_copy(update={"transport": "in_process_staged"})
    staging = plan_memory(config.model_copy(update={"sync": sync}), QWEN, [H200], longest=1000)
    plain = plan_memory(config, QWEN, [H200], longest=1000)
    assert staging is not None and plain is not None
    weights = 2 * QWEN.num_parameters
    assert (plain.staged, staging.staged) == (0, weights)
    assert staging.engine == plain.engine
    assert staging.cache == plain.cache - weights
    assert staging.memory_share == (plain.engine - weights) / H200.total_bytes


BOX = [Gpu(name="H100", total_bytes=80 * GB, free_bytes=79 * GB)] * 8


def plan_ranks(longest: int, **parallel: int) -> Any:
    config = config_of(
        placement={"trainer": [0, 1, 2, 3], "engines": [4]},
        trainer={"dtype": "bfloat16", "checkpointing": "full", "parallel": parallel},
        sync={"transport": "shared_memory"},
    )
    return plan_memory(config, QWEN, BOX, longest=longest)


def test_ranks_that_split_a_sequence_hold_a_part_of_its_activations() -> None:
    plan = plan_ranks(400_000, context=4)
    whole = estimate_trainer(config_of(trainer={"checkpointing": "full"}), QWEN, longest=400_000)
    quarter = estimate_trainer(config_of(trainer={"checkpointing": "full"}), QWEN, longest=100_000)
    assert whole.activations == 4 * quarter.activations > 34 * GB
    own = whole.resident // 4 + 2 * whole.weights // QWEN.num_layers
    assert plan.rank == int(0.6e9) + own + quarter.activations + max(quarter.head, quarter.layer)
    assert plan_ranks(400_001, context=4).rank > plan.rank  # the longest part counts


def test_a_sequence_that_is_too_long_is_refused_with_the_setting_that_splits_it() -> None:
    with pytest.raises(UserError) as refusal:
        plan_ranks(400_000, shard=4)
    assert str(refusal.value) == (
        "each of 4 ranks of the trainer needs about 89.1 GB, and of the 80.0 GB of H100 76.6 GB can be used; set "
        "trainer.optimizer_states=8bit or cpu or trainer.parallel.context above 1 or trainer.parallel.shard above 4"
    )


def test_states_that_are_too_large_are_those_of_each_rank() -> None:
    large = replace(QWEN, num_parameters=40 * QWEN.num_parameters)
    config = config_of(
        placement={"trainer": [0, 1, 2, 3], "engines": [4]}, trainer={"parallel": {"data": 2, "shard": 2}}
    )
    states = estimate_trainer(config, large, longest=1000).resident // 2
    with pytest.raises(
        UserError, match=rf"; {states / 1e9:.1f} GB of it are .*shard above 2\), or take a smaller"
    ):
        plan_memory(config, large, BOX, longest=1000)


def test_weights_that_are_gathered_for_a_whole_step_are_counted() -> None:
    """All 28 layers in bfloat16 instead of two of them."""
    layer, step = (
        rank_bytes(config_of(trainer={"gather": gather}), QWEN, longest=1024, shards=4)
        for gather in ("layer", "step")
    )
    assert step - layer == pytest.approx(2 * QWEN.num_parameters * 26 / 28, rel=1e-6)


def test_ranks_have_room_up_to_what_can_be_used_of_a_gpu() -> None:
    """Not on the engines' GPU, which is shared out otherwise."""
    config = config_of(
        placement={"trainer": [0, 1], "engines": [2]},
        trainer={"gather": "step", "parallel": {"shard": 2}},
        sync={"transport": "shared_memory"},
    )
    needed = rank_bytes(config, QWEN, longest=1000, shards=2)
    for spare, fits in ((0, True), (-1, False)):
        gpu = Gpu(name="H100", total_bytes=0, free_bytes=needed + spare)
        assert ranks_have_room(config, QWEN, [gpu] * 3, longest=1000) is fits
    roomy = Gpu(name="H100", total_bytes=0, free_bytes=2 * needed)
    together = config.model_copy(update={"placement": config.placement.model_copy(update={"engines": (0,)})})
    assert not ranks_have_room(together, QWEN, [roomy] * 3, longest=1000)
