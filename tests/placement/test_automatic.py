"""What `auto` becomes on machines that are only described, and once on a real GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from penstock.config.loader import build, load_config
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError, UserError
from penstock.placement.automatic import COMPILED_FROM, check_transport, resolve_auto
from penstock.placement.gpus import Gpu

H200 = Gpu(name="NVIDIA H200", total_bytes=150 * 10**9, free_bytes=149 * 10**9)
T4 = Gpu(name="Tesla T4", total_bytes=16 * 10**9, free_bytes=15 * 10**9, has_bfloat16=False)
ON_CPU = ("float32", "float32", "off", "off", "shared_memory")
ON_GPU = ("bfloat16", "bfloat16", "on", "on", "cuda_ipc")
LARGE = 1_500_000_000
ON = {"engine": {"record_routing": "on"}}


def chosen(*gpus: Gpu, num_parameters: int = LARGE, **sections: dict[str, Any]) -> tuple[str, ...]:
    config = resolve_auto(build(PenstockConfig, sections), gpus, num_parameters=num_parameters).config
    embedded = config.engine.embedded
    return (
        config.engine.dtype,
        config.trainer.dtype,
        embedded.compile,
        config.trainer.compile,
        config.sync.transport,
    )


def test_a_cpu_has_the_plain_settings() -> None:
    assert chosen() == ON_CPU
    assert chosen(H200, model={"device": "cpu"}) == ON_CPU


def test_a_gpu_has_the_fast_ones_whether_found_or_only_named() -> None:
    assert chosen(H200) == ON_GPU
    assert chosen(model={"device": "cuda"}) == ON_GPU
    assert chosen(H200, model={"device": "cuda"}, engine={"device": "cuda:0"}) == ON_GPU


def test_small_models_are_not_compiled() -> None:
    assert chosen(H200, num_parameters=COMPILED_FROM) == ON_GPU
    smaller = ("bfloat16", "bfloat16", "off", "off", "cuda_ipc")
    assert chosen(H200, num_parameters=COMPILED_FROM - 1) == smaller


def test_matrices_that_are_split_are_not_compiled() -> None:
    split = chosen(H200, trainer={"parallel": {"tensor": 2}})
    assert split == ("bfloat16", "bfloat16", "on", "off", "cuda_ipc")


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"context": 2}], ids=str)
def test_split_weights_are_gathered_once_a_step_where_there_is_room(parallel: dict[str, int]) -> None:
    asked = []

    def has_room(config: PenstockConfig) -> bool:
        asked.append((config.trainer.gather, config.trainer.dtype))
        return True

    config = build(PenstockConfig, {"trainer": {"parallel": parallel}})
    roomy, full = (resolve_auto(config, [H200, H200], has_room=room) for room in (has_room, lambda _: False))
    assert asked == [("step", "bfloat16")]
    assert (roomy.config.trainer.gather, full.config.trainer.gather) == ("step", "layer")
    assert str(roomy).endswith("trainer.gather=step (each GPU has room for all weights)")
    assert "trainer.gather" not in str(full)


def test_weights_that_nobody_splits_are_not_gathered() -> None:
    """By ranks that are not told what room they have neither."""
    for parallel in ({"data": 2}, {"tensor": 2}):
        config = build(PenstockConfig, {"trainer": {"parallel": parallel}})
        assert resolve_auto(config, [H200, H200], has_room=lambda _: True).config.trainer.gather == "layer"
    split = resolve_auto(build(PenstockConfig, {"trainer": {"parallel": {"shard": 2}}}))
    assert split.config.trainer.gather == "layer"
    assert "trainer.gather" in [
        choice.setting for choice in split.choices
    ]  # chosen anew when the run goes on


def test_a_gpu_without_bfloat16_computes_in_float32() -> None:
    assert chosen(T4) == ("float32", "float32", "on", "on", "cuda_ipc")


def test_two_gpus_have_no_memory_in_common() -> None:
    apart = chosen(H200, H200, model={"device": "cuda:0"}, engine={"device": "cuda:1"})
    assert apart == (*ON_GPU[:4], "shared_memory")


def check_named_ipc(**sections: dict[str, Any]) -> None:
    config = build(PenstockConfig, {"sync": {"transport": "cuda_ipc"}, **sections})
    resolved = resolve_auto(config, [H200, H200])
    check_transport(resolved.config, resolved.sites)


def test_memory_of_one_gpu_can_not_be_asked_for_on_two() -> None:
    with pytest.raises(UserError) as refusal:
        check_named_ipc(placement={"trainer": [0], "engines": [1]})
    assert str(refusal.value) == (
        "sync.transport=cuda_ipc needs trainer and engines on one GPU, got trainer on cuda:0 and engines on cuda:1; "
        "use shared_memory, or leave it out"
    )
    with pytest.raises(UserError, match="got trainer on cuda:0 and engines on cpu; use shared_memory"):
        check_named_ipc(engine={"device": "cpu"})
    check_named_ipc()
    check_named_ipc(placement={"trainer": [1], "engines": [1]})


def test_each_side_gets_what_its_own_device_can() -> None:
    mixed = chosen(H200, T4, model={"device": "cuda:0"}, engine={"device": "cuda:1"})
    assert mixed == ("float32", "bfloat16", "on", "on", "shared_memory")
    on_cpu = chosen(H200, engine={"device": "cpu"})
    assert on_cpu == ("float32", "bfloat16", "off", "on", "shared_memory")


def test_what_is_named_stays_and_is_not_told() -> None:
    sections: dict[str, dict[str, Any]] = {
        "engine": {"dtype": "float16", "embedded": {"compile": False, "max_batch": 7}},
        "trainer": {"compile": False},
        "sync": {"transport": "shared_memory"},
    }
    assert chosen(H200, **sections) == ("float16", "bfloat16", "off", "off", "shared_memory")
    resolved = resolve_auto(build(PenstockConfig, sections), (H200,), num_parameters=LARGE)
    assert resolved.config.engine.embedded.max_batch == 7
    assert str(resolved) == "auto, on NVIDIA H200: trainer.dtype=bfloat16 (float32 master weights)"


def test_what_is_sent_must_fit_into_what_was_chosen() -> None:
    wide = build(PenstockConfig, {"sync": {"dtype": "float32"}})
    assert resolve_auto(wide).config.engine.dtype == "float32"
    with pytest.raises(ConfigError, match=r"what engines of bfloat16 hold without loss, got float32"):
        resolve_auto(wide, (H200,), num_parameters=LARGE)


def test_a_resolved_config_is_final() -> None:
    first = resolve_auto(PenstockConfig(), (H200,), num_parameters=LARGE)
    again = resolve_auto(first.config, (), num_parameters=0)
    assert (again.config, again.choices, again.engine_choices) == (first.config, (), "")


def test_the_line_says_what_and_why() -> None:
    resolved = resolve_auto(PenstockConfig(), (H200,), num_parameters=300_000)
    assert str(resolved) == (
        "auto, on NVIDIA H200: engine.dtype=bfloat16, trainer.dtype=bfloat16 (float32 master weights), "
        "engine.embedded.compile=off, trainer.compile=off (0.3M parameters, on from 100M), "
        "sync.transport=cuda_ipc (one GPU)"
    )
    assert resolved.engine_choices == (
        "auto, on NVIDIA H200: engine.dtype=bfloat16, engine.embedded.compile=off (0.3M parameters, on from 100M)"
    )
    on_cpu = resolve_auto(PenstockConfig(), (), num_parameters=0)
    assert str(on_cpu).startswith("auto, on cpu: engine.dtype=float32, trainer.dtype=float32, ")
    config = build(PenstockConfig, {"engine": {"device": "cpu"}})
    words = str(resolve_auto(config, (T4,), num_parameters=LARGE))
    assert words.startswith("auto, trainer on Tesla T4, engine on cpu: engine.dtype=float32, ")
    assert "trainer.dtype=float32 (this GPU has no bfloat16)" in words


def test_experts_are_recorded_in_runs_that_train_a_model_with_some() -> None:
    resolved = resolve_auto(PenstockConfig(), num_experts=8)
    assert resolved.config.engine.record_routing == "on"
    assert str(resolved).endswith("engine.record_routing=on (8 experts)")
    dense, asked_for = (resolve_auto(PenstockConfig(), num_experts=0), build(PenstockConfig, ON))
    assert dense.config.engine.record_routing == "off"
    assert "record_routing" not in str(dense)
    for config in (PenstockConfig(), asked_for):
        evaluated = resolve_auto(config, num_experts=8, trains=False)
        assert evaluated.config.engine.record_routing == "off"
        assert "record_routing" not in evaluated.engine_choices
    assert resolve_auto(asked_for).config.engine.record_routing == "on"
    off = build(PenstockConfig, {"engine": {"record_routing": "off"}})
    assert resolve_auto(off, num_experts=8).config.engine.record_routing == "off"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("words", "compiled"), [((), "off"), (("engine.embedded.compile=on", "trainer.compile=on"), "on")]
)
def test_the_demo_learns_with_what_is_chosen_on_a_gpu(
    tmp_path: Path, words: tuple[str, ...], compiled: str
) -> None:
    program = "from penstock.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "train", "model.device=cuda", f"run.folder={tmp_path}", *words],
        capture_output=True,
        text=True,
        timeout=540,
    )
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 0
    shown = " ".join(ended.stdout.split())
    assert "engine.dtype=bfloat16, trainer.dtype=bfloat16 (float32 master weights)" in shown
    assert "sync.transport=cuda_ipc (one GPU)" in shown
    config = yaml.safe_load((tmp_path / "demo" / "config.yaml").read_text())
    assert (config["engine"]["dtype"], config["trainer"]["dtype"]) == ("bfloat16", "bfloat16")
    assert (config["engine"]["embedded"]["compile"], config["trainer"]["compile"]) == (compiled, compiled)
    assert config["sync"]["transport"] == "cuda_ipc"
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["heldout_reward_start"] < 0.4
    assert summary["heldout_reward_end"] > 0.8


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ([], "shared_memory"),
        (["launcher=ray"], "http"),
        (["launcher=ray", "sync.folder=/shared"], "filesystem"),
        (["launcher=ray", "sync.interface=eth0"], "collective"),
        (["launcher.listen=127.0.0.1:0", "launcher.token_file=token"], "http"),
        (["launcher=ray", "sync.transport=filesystem", "sync.interface=eth0"], "filesystem"),
    ],
)
def test_between_machines_what_is_named_says_who_reaches_whom(settings: list[str], transport: str) -> None:
    config = load_config(PenstockConfig, None, ["model.device=cpu", *settings])
    assert resolve_auto(config).config.sync.transport == transport
