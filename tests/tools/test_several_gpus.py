"""The commands that `tools/several_gpus.sh` would run on machines with several GPUs, which are only described here."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from transformers import LlamaConfig

from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.placement.gpu_pools import Needs, resolve_pools
from penstock.placement.gpus import Gpu
from penstock.placement.memory_plan import CONTEXT_BYTES
from penstock.placement.refusals import check_ranks

SCRIPT = Path(__file__).parents[2] / "tools" / "several_gpus.sh"
GPU = Gpu(name="H100", total_bytes=80 * 10**9, free_bytes=79 * 10**9)
NEEDS = Needs(num_parameters=1000, rank=lambda shards: CONTEXT_BYTES, room=lambda gpu: gpu.free_bytes)
DEMO = LlamaConfig(num_attention_heads=4, num_key_value_heads=4)
STAND_IN = """#!/bin/bash
# Stands for python: a run leaves the log of its last rank, unless it is told to lack one, or to fail.
name=$(grep -o 'run.name=[a-z]*' <<<"$*" | cut -d= -f2)
[ -n "$name" ] || exit 0
mkdir -p runs/$name/logs
[ "$name" = context ] && exit 1
[ "$name" = data ] || touch runs/$name/logs/trainer.log runs/$name/logs/trainer1.log
"""


def commands_for(gpus: int) -> list[tuple[str, list[str]]]:
    shown = subprocess.run(
        ["bash", str(SCRIPT), "--commands", str(gpus)], check=True, capture_output=True, text=True
    ).stdout
    parts = [line.partition(": ") for line in shown.splitlines()]
    return [(part, command.split()) for part, _, command in parts]


def test_the_script_can_be_read_by_bash() -> None:
    for path in (SCRIPT, SCRIPT.with_name("gpu_check.sh")):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (3, 2), (4, 2), (6, 4), (8, 4)])
def test_every_run_has_several_ranks_and_can_be_placed(gpus: int, ranks: int) -> None:
    found: dict[str, tuple[int, int]] = {}
    for part, command in commands_for(gpus):
        if command[:2] != ["penstock", "train"]:
            continue
        config, pools = resolve_pools(load_config(PenstockConfig, None, command[2:]), [GPU] * gpus, NEEDS)
        assert pools is not None
        check_ranks(config, DEMO)
        found[part] = (len(pools.trainer), sum(len(group) for group in pools.engines))
    engines = gpus - ranks
    split = dict.fromkeys(("shard", "context", "tensor", "data", "broadcast", "kill"), (ranks, engines))
    assert found == (split | {"broadcast": (1, 1)} if gpus == 2 else split)


def test_gradients_are_computed_on_gpus_and_a_rank_is_killed() -> None:
    commands = commands_for(4)
    gradients = {part: command for part, command in commands if part.endswith("-grad")}
    assert len(gradients) == 3
    assert all(command[:2] == ["env", "PENSTOCK_RANKS_ON=cuda"] for command in gradients.values())
    assert all(SCRIPT.parents[1].joinpath(command[-1]).is_file() for command in gradients.values())
    assert [" ".join(command) for part, command in commands if part in ("kill", "resume")][1:] == [
        "kill -KILL rank 1",
        "penstock resume runs/kill run.steps=120 trainer.parallel.shard=1 placement.trainer=[0]",
    ]


def test_one_gpu_is_too_few() -> None:
    ended = subprocess.run(
        ["bash", str(SCRIPT), "--commands", "1"], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "at least 2 GPUs are needed, got 1\n")


def test_a_run_that_fails_or_lacks_a_rank_is_in_the_table(tmp_path: Path) -> None:
    """With a stand-in for Python that makes no checkpoint and has no ranks to kill."""
    script, programs = tmp_path / "tools" / "several_gpus.sh", tmp_path / "bin"
    for folder in (script.parent, programs):
        folder.mkdir()
    script.write_text(SCRIPT.read_text().replace("limit_s=120", "limit_s=1"))
    (programs / "python").write_text(STAND_IN)
    (programs / "python").chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", str(script), str(tmp_path), "2"], check=False, capture_output=True, text=True, env=environ
    )
    rows = dict(re.findall(r"^(\S+) +(passed|FAILED)", ended.stdout, re.MULTILINE))
    failed = {part for part, how in rows.items() if how == "FAILED"}
    assert failed == {"context", "data", "kill"}
    assert len(rows) == 11
    assert ended.returncode == 1
