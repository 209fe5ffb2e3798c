"""Which GPU each worker gets: by the config, by what a model needs, and what is refused."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError, UserError
from penstock.models.tokenizer import ChatTokenizer
from penstock.placement.automatic import resolve_auto, sites_of
from penstock.placement.gpu_pools import (
    Needs,
    Pools,
    engine_pools,
    engines_alone,
    resolve_pools,
    used_gpus,
    visible_gpus,
)
from penstock.placement.gpus import Gpu, find_gpus
from penstock.placement.memory_plan import estimate_trainer, needs_of, plan_memory, rank_bytes
from penstock.placement.shares import shares_a_gpu
from penstock.processes.launchers.local import LocalLauncher
from penstock.records import Task
from penstock.run.preflight import Prepared
from penstock.run.workers import start_workers
from tests.placement.test_memory_plan import QWEN

GB = 10**9
GPU = Gpu(name="H100", total_bytes=80 * GB, free_bytes=79 * GB)
BOX = (GPU,) * 8


def config_of(**sections: Any) -> PenstockConfig:
    return build(PenstockConfig, sections)


def needs(rank: Callable[[int], int] = lambda shards: 30 * GB // shards, parameters: int = 10**9) -> Needs:
    return Needs(num_parameters=parameters, rank=rank, room=lambda gpu: gpu.free_bytes - 2 * GB)


def pools_of(gpus: tuple[Gpu, ...] = BOX, needed: Needs | None = None, **sections: Any) -> Pools | None:
    return resolve_pools(config_of(**sections), gpus, needed or needs())[1]


def ones(*numbers: int) -> tuple[tuple[int, ...], ...]:
    return tuple((number,) for number in numbers)


def test_named_gpus_are_taken_as_they_are_named() -> None:
    config, pools = resolve_pools(config_of(placement={"trainer": [1], "engines": [2, 0, 3]}), BOX, needs())
    assert pools == Pools(trainer=(1,), engines=ones(2, 0, 3))
    assert str(pools) == "GPUs: trainer on 1, 3 engines on 0, 2, 3"
    assert config.engine.count == 3
    assert engine_pools(config) == ones(2, 0, 3)
    assert [site.device for site in (sites_of(config, BOX).trainer, sites_of(config, BOX).engine)] == [
        "cuda:1",
        "cuda:2",
    ]
    assert not shares_a_gpu(config, BOX)
    assert resolve_auto(config, BOX).config.sync.transport == "shared_memory"


def test_where_one_pool_is_named_the_other_gets_the_rest() -> None:
    named = pools_of(placement={"trainer": [7]})
    assert named is not None
    assert named.engines == ones(0, 1, 2, 3, 4, 5, 6)
    named = pools_of(placement={"engines": [0, 1]})
    assert named is not None
    assert (named.trainer, named.engines) == ((2,), ones(0, 1))


def test_a_resumed_run_has_the_same_pools() -> None:
    config, pools = resolve_pools(config_of(), BOX, needs())
    written = build(PenstockConfig, config.model_dump(mode="json"))
    again, same = resolve_pools(written, BOX, needs())
    assert pools is not None and same is not None
    assert (same.trainer, same.engines) == (pools.trainer, pools.engines)
    assert again.placement == config.placement


def test_without_a_word_the_trainer_gets_as_few_as_hold_it() -> None:
    config, pools = resolve_pools(config_of(), BOX[:4], needs())
    assert pools is not None
    assert (pools.trainer, pools.engines) == ((0,), ones(1, 2, 3))
    assert str(pools) == (
        "GPUs: trainer on 0, 3 engines on 1, 2, 3; the trainer needs about 30.0 GB, and 77.0 GB of a GPU can be used; "
        "generation gets the rest (placement.trainer and placement.engines name others)"
    )
    assert (config.placement.trainer, config.placement.engines) == ((0,), (1, 2, 3))
    assert config.engine.count == 3


@pytest.mark.parametrize(
    ("case", "gpus", "needed", "sections"),
    [
        ("one GPU", BOX[:1], needs(), {}),
        ("a small model", BOX, needs(parameters=10**6), {}),
        ("a device of its own", BOX, needs(), {"model": {"device": "cuda:1"}}),
        (
            "ranks on a CPU",
            BOX,
            needs(),
            {"model": {"device": "cpu"}, "engine": {"device": "cuda"}, "trainer": {"parallel": {"data": 2}}},
        ),
        ("engines on a CPU", BOX, needs(), {"engine": {"device": "cpu"}}),
        (
            "servers of somebody else",
            BOX,
            needs(),
            {"engine": {"kind": "vllm", "vllm": {"urls": ["http://a:1"]}}},
        ),
        ("more engines than GPUs", BOX[:2], needs(), {"engine": {"count": 2}}),
        ("a cluster", BOX, needs(), {"launcher": {"kind": "ray"}}),
        ("others on all but one", (GPU, replace(GPU, free_bytes=40 * GB)), needs(), {}),
    ],
)
def test_who_shares_a_gpu_as_before(
    case: str, gpus: tuple[Gpu, ...], needed: Needs, sections: dict[str, Any]
) -> None:
    config = config_of(**sections)
    assert resolve_pools(config, gpus, needed) == (config, None)


@pytest.mark.parametrize(("needed_gb", "ranks"), [(70, 1), (140, 2), (300, 4), (9000, 7)])
def test_a_trainer_that_no_gpu_holds_is_split(needed_gb: int, ranks: int) -> None:
    """Into as many ranks as hold it; where no number does, the memory plan says so."""
    config, found = resolve_pools(config_of(), BOX, needs(lambda shards: needed_gb * GB // shards))
    assert found is not None
    assert found.trainer == tuple(range(ranks))
    assert config.trainer.parallel.num_ranks == config.trainer.parallel.shard == ranks
    assert config.engine.count == 8 - ranks


def test_ranks_get_a_gpu_each() -> None:
    config, found = resolve_pools(config_of(trainer={"parallel": {"data": 2}}), BOX[:4], needs())
    assert found is not None
    assert (found.trainer, found.engines) == ((0, 1), ones(2, 3))
    assert "trainer on 0, 1 (2 ranks), 2 engines on 2, 3; trainer.parallel has 2 ranks" in str(found)
    assert (config.trainer.parallel.data, config.trainer.parallel.shard) == (2, 1)
    named, _ = resolve_pools(config_of(placement={"trainer": [0, 1], "engines": [2]}), BOX, needs())
    assert named.trainer.parallel.shard == 2


def test_ranks_on_every_gpu_leave_engines_a_cpu_and_go_on_so() -> None:
    """The config that names their GPUs is the one that a resumed run reads."""
    asked = config_of(trainer={"parallel": {"shard": 2}}, engine={"device": "cpu"})
    config, found = resolve_pools(asked, BOX[:2], needs())
    assert found is not None
    assert (found.trainer, found.engines) == ((0, 1), ((),))
    assert resolve_pools(config, BOX[:2], needs())[0] == config
    with pytest.raises(UserError, match="engine.device must be auto where placement names GPUs, got cpu"):
        pools_of(placement={"trainer": [0], "engines": [1]}, engine={"device": "cpu"})


def test_a_plan_for_ranks_splits_what_they_hold() -> None:
    config = config_of(placement={"trainer": [0, 1], "engines": [2, 3]})
    config = resolve_auto(resolve_pools(config, BOX, needs())[0], BOX).config
    plan = plan_memory(config, QWEN, BOX, longest=1000)
    assert plan is not None
    assert (plan.rank, plan.num_ranks) == (rank_bytes(config, QWEN, longest=1000, shards=2), 2)
    estimate = estimate_trainer(config, QWEN, longest=1000)
    alone = rank_bytes(config, QWEN, longest=1000, shards=1)
    gathered = 2 * estimate.weights // QWEN.num_layers
    assert alone - plan.rank == estimate.resident // 2 - gathered
    assert "each of 2 ranks of the trainer about" in str(plan)


def test_gpus_that_others_hold_or_that_score_are_left_alone() -> None:
    taken = replace(GPU, free_bytes=40 * GB)
    found = pools_of((GPU, taken, GPU, GPU, GPU), reward={"device": "cuda:0"})
    assert found is not None
    assert (found.trainer, found.engines, found.idle) == ((2,), ones(3, 4), (0, 1))


def test_gpus_unlike_the_first_are_left_alone() -> None:
    small = Gpu(name="A10", total_bytes=24 * GB, free_bytes=23 * GB)
    found = pools_of((GPU, GPU, small))
    assert found is not None
    assert (found.trainer, found.engines, found.idle) == ((0,), ones(1), (2,))


def test_as_many_engines_as_the_config_counts() -> None:
    found = pools_of(engine={"count": 2})
    assert found is not None
    assert (found.trainer, found.engines, found.idle) == ((0,), ones(1, 2), (3, 4, 5, 6, 7))


def test_a_server_over_several_gpus_gets_a_group() -> None:
    engine = {"kind": "vllm", "vllm": {"tensor_parallel": 2}}
    config, found = resolve_pools(config_of(engine=engine), BOX, needs())
    assert found is not None
    assert (found.trainer, found.engines, found.idle) == ((0,), ((1, 2), (3, 4), (5, 6)), (7,))
    assert str(found).startswith("GPUs: trainer on 0, engines on 1, 2 and 3, 4 and 5, 6, 7 idle; ")
    assert config.engine.count == 3
    assert engine_pools(config) == found.engines


def test_engines_of_two_kinds_share_a_pool() -> None:
    engine = {"kind": "embedded", "beside": {"vllm": 1}, "vllm": {"tensor_parallel": 2}}
    config, found = resolve_pools(
        config_of(engine=engine, placement={"trainer": [0], "engines": [1, 2, 3, 4]}), BOX, needs()
    )
    assert found is not None
    assert found.engines == ((1,), (2,), (3, 4))
    assert config.engine.count == 2
    assert [member.kind for member in config.engine.members] == ["embedded", "embedded", "vllm"]


def test_engines_of_a_run_are_evaluated_where_they_were_or_as_one() -> None:
    config, _ = resolve_pools(config_of(placement={"trainer": [0], "engines": [1, 2]}), BOX, needs())
    assert engines_alone(config, BOX[:3]) is config
    elsewhere = engines_alone(config, BOX[:1])
    assert elsewhere.engine.count == 1
    assert engine_pools(elsewhere) == ((),)
    assert used_gpus(config) == {0, 1, 2}
    assert used_gpus(elsewhere) == frozenset()


def test_one_gpu_for_both_is_shared() -> None:
    config, found = resolve_pools(config_of(placement={"trainer": [3], "engines": [3]}), BOX, needs())
    assert found == Pools(trainer=(3,), engines=((3,),))
    assert shares_a_gpu(config, BOX)
    assert engine_pools(config) == ((3,),)
    assert resolve_auto(config, BOX).config.sync.transport == "cuda_ipc"


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"placement": {"trainer": [8]}},
            "placement.trainer names GPU 8, and 8 GPUs can be seen here; name those",
        ),
        ({"placement": {"engines": [1, 9]}}, "placement.engines names GPU 9, and 8 GPUs can be seen here"),
        (
            {"placement": {"trainer": [0], "engines": [0, 1]}},
            "placement.trainer and placement.engines both name GPU 0; name different ones, or one and the same",
        ),
        (
            {"placement": {"trainer": [0], "engines": [1, 2, 3]}, "engine": {"count": 2}},
            "placement.engines names 3 GPUs, and 2 engines of engine.count and engine.beside take 2; name as many",
        ),
        (
            {
                "placement": {"trainer": [0], "engines": [1, 2, 3]},
                "engine": {"kind": "vllm", "vllm": {"tensor_parallel": 2}},
            },
            "placement.engines names 3 GPUs, and an engine takes 2, which does not divide them; name another number",
        ),
        (
            {"placement": {"trainer": [0, 1, 2]}, "trainer": {"parallel": {"shard": 2}}},
            "placement.trainer names 3 GPUs, and trainer.parallel has 2 ranks; name one GPU for each",
        ),
        (
            {"trainer": {"parallel": {"shard": 2}}, "model": {"device": "cuda:1"}},
            "model.device must be auto where trainer.parallel has 2 ranks, got cuda:1; name GPUs in placement.trainer",
        ),
        (
            {"trainer": {"parallel": {"shard": 8}}},
            "trainer.parallel has 8 ranks and engines take 1 GPU, and 8 of 8 GPUs are free here; lower",
        ),
        (
            {"placement": {"trainer": list(range(8))}},
            "placement.trainer leaves no GPU for the engines; name fewer",
        ),
        (
            {"placement": {"trainer": [0]}, "model": {"device": "cuda:1"}},
            "model.device must be auto where placement names GPUs, got cuda:1; leave it out",
        ),
        (
            {"placement": {"trainer": [0]}, "launcher": {"kind": "ray"}},
            "need launcher=local, got ray, which finds",
        ),
    ],
)
def test_what_can_not_be_placed_is_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        pools_of(**sections)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"each GPU must be named once, got \[1, 1\]"):
        config_of(placement={"trainer": [1, 1]})


def test_gpus_that_are_taken_or_unequal_are_refused() -> None:
    taken = replace(GPU, free_bytes=20 * GB)
    with pytest.raises(
        UserError, match="names GPU 1, of whose 80.0 GB others hold 60.0 GB; name another one, or"
    ):
        pools_of((GPU, taken), placement={"trainer": [1], "engines": [0]})
    small = Gpu(name="A10", total_bytes=24 * GB, free_bytes=23 * GB)
    with pytest.raises(
        UserError,
        match=r"placement.engines must name equal GPUs, got GPU 1 \(H100, 80.0 GB\) and GPU 2 \(A10, 24.0 GB\)",
    ):
        pools_of((GPU, GPU, small), placement={"trainer": [0], "engines": [1, 2]})
    named = pools_of((GPU, small), placement={"trainer": [0], "engines": [1]})  # pools may differ
    assert named is not None and named.engines == ones(1)


def test_workers_see_their_own_gpus_by_the_names_that_this_process_has() -> None:
    assert visible_gpus((), {}) == {}
    assert visible_gpus((2, 0), {}) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    assert visible_gpus((1,), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}


def test_memory_is_planned_for_each_pool() -> None:
    config, pools = resolve_pools(config_of(), BOX[:4], needs_of(config_of(), QWEN, BOX[:4], longest=1000))
    assert pools is not None and pools.trainer == (0,)
    config = resolve_auto(config, BOX[:4], num_parameters=QWEN.num_parameters).config
    plan = plan_memory(config, QWEN, BOX[:4], longest=1000)
    assert plan is not None
    assert plan.trainer == 0
    assert plan.rank == rank_bytes(config, QWEN, longest=1000, shards=1)
    assert plan.engine == int(0.9 * GPU.total_bytes)
    assert "trainer about" in str(plan) and "on a GPU of its own; each of 3 engines at most 72.0 GB" in str(
        plan
    )


SMI = """#!/bin/sh
for number in 0 1 2 3; do echo "$number, GPU-$number, 81559, 81000, 9.0, NVIDIA H100"; done
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, ...]:
    """Four GPUs, as a stand-in for `nvidia-smi` lists them."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    return find_gpus({"PATH": f"{tmp_path}:/bin:/usr/bin"})


@pytest.mark.processes
@pytest.mark.full
def test_processes_find_their_gpus_in_their_environment(
    box: tuple[Gpu, ...], tiny_model: Path, tmp_path: Path
) -> None:
    """Two ranks and two engines. They compute on a CPU here; what they would see is what counts."""
    assert len(box) == 4
    config, _ = resolve_pools(
        config_of(
            model={"name": str(tiny_model)},
            reward={"functions": ["penstock.bench.workload:reward"]},
            placement={"trainer": [3, 0], "engines": [1, 2]},
            trainer={"dtype": "float32"},
            engine={"dtype": "float32"},
        ),
        box,
        None,
    )
    prepared = Prepared(
        config=resolve_auto(config).config,
        model=str(tiny_model),
        tokenizer=ChatTokenizer(str(tiny_model)),
        tasks=[Task(id="0", prompt="1+1=")],
        heldout=[],
        folder=tmp_path,
        max_context=64,
        gpus=box,
    )

    async def main() -> dict[str, str]:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            workers = await start_workers(launcher, prepared)
            trainer, *engines = workers.places
            places: list[Any] = [*trainer.members, *engines]  # type: ignore[union-attr]
            return {
                place.name: psutil.Process(place._worker.pid).environ()["CUDA_VISIBLE_DEVICES"]
                for place in places
            }

    found = asyncio.run(main())
    assert found == {"trainer": "3,0", "trainer1": "3,0", "engine0": "1", "engine1": "2"}
