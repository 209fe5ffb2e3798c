"""Checkpoints from ranks: read again by another number of ranks, in another layout, with nothing lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.algorithms.config import AlgorithmConfig
from penstock.errors import UserError
from penstock.trainer.checkpoint.checkpoint_writer import CheckpointRequest, CheckpointWriter
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.optimizers import eightbit_adamw, host_adamw
from penstock.trainer.parallel.process_ranks import ProcessRanks, leave_ranks
from penstock.trainer.parallel.rank_layout import num_plans
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.packing import plan_step
from tests.trainer.builders import tiny_model
from tests.trainer.parallel.layout_gradients import join
from tests.trainer.parallel.rank_processes import on_ranks
from tests.trainer.test_algorithms import near_policy

pytestmark = pytest.mark.processes

ALONE: dict[str, int] = {}


def trainer_of(ranks: ProcessRanks | None, states: str = "float32") -> PolicyTrainer:
    config = TrainerConfig(
        logprob_gap_warning=1e3, learning_rate=0.01, weight_decay=0.1, optimizer_states=states
    )
    model = tiny_model("qwen3")
    return PolicyTrainer(model, config=config, algorithm=AlgorithmConfig(), total_steps=10, parallel=ranks)


def step(trainer: PolicyTrainer, ranks: ProcessRanks | None, number: int) -> None:
    parallel = ParallelConfig() if ranks is None else ranks.layout.parallel
    groups = near_policy(tiny_model("qwen3"), number, shape=(3, 3))
    plans = plan_step(number, groups, ranks=num_plans(parallel), micro_batch_tokens=30)
    trainer.step(plans[0 if ranks is None else ranks.layout.plan])


def write(trainer: PolicyTrainer, ranks: ProcessRanks | None, folder: Path, number: int) -> Any:
    """Begun before a step that it must not see, and awaited after it."""
    writer = CheckpointWriter(trainer, lambda path: None, ranks=None if ranks is None else ranks.checkpoints)
    writer.begin(CheckpointRequest(folder=str(folder), files={"progress": b"here"}))
    step(trainer, ranks, number)
    return writer.written().result(60)


def relay(
    rank: int, folder: Path, layouts: list[dict[str, int]], runs: Path, states: str = "float32"
) -> None:
    """Each layout goes on from the checkpoint of the one before, makes a step, and writes the next."""
    host_adamw.BUCKET_VALUES = 1000  # so that masters are cut
    for number, sizes in enumerate(layouts, start=1):
        parallel = ParallelConfig(**sizes)
        if rank >= parallel.num_ranks:
            continue
        inside = folder / str(number)
        inside.mkdir(exist_ok=True)
        ranks = None if parallel.num_ranks == 1 else join(rank, inside, parallel)
        trainer = trainer_of(ranks, states)
        before = runs / f"step-{number - 1}"
        if number > 1:
            trainer.load_state(before / "trainer")
        step(trainer, ranks, number)
        write(trainer, ranks, runs / f"step-{number}", 100 + number)
        if ranks is not None:
            ranks.world.gather(torch.zeros(1).numpy())  # nobody leaves before all are done
        leave_ranks()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_as_alone(runs: Path, num_steps: int) -> None:
    alone = trainer_of(None)
    for number in range(1, num_steps + 1):
        step(alone, None, number)
        expected = {name: tensor.clone() for name, tensor in alone.trained.own_saved().items()}
        for name, tensor in weights_of(runs / f"step-{number}").items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_a_checkpoint_goes_from_layout_to_layout(tmp_path: Path) -> None:
    layouts = [
        {"shard": 2},
        ALONE,
        {"data": 2},
        {"context": 2},
        {"tensor": 2},
        {"shard": 2},
        {"tensor": 2},
        ALONE,
    ]
    on_ranks(2, relay, layouts, tmp_path)
    assert_same_as_alone(tmp_path, len(layouts))
    files = {str(path.relative_to(tmp_path / "step-1")) for path in (tmp_path / "step-1").rglob("*.*")}
    assert files >= {
        "trainer/index.json",
        "trainer/rank-0/shards.json",
        "trainer/rank-1/state.json",
        "trainer/rank-1/tensors-0.safetensors",
        "model/model.safetensors",
        "model/config.json",
    }
    assert not any(name.endswith((".pt", ".pkl", ".distcp")) for name in files)
    AutoModelForCausalLM.from_pretrained(tmp_path / "step-1" / "model")
    # Of copies one writes.
    assert not (tmp_path / "step-3" / "trainer" / "rank-1").exists()


def test_states_on_the_host_go_from_layout_to_layout_too(tmp_path: Path) -> None:
    """They are those of float32, cut into slices that no two layouts cut alike."""
    layouts = [ALONE, {"shard": 2}, {"tensor": 2}, {"data": 2}, {"context": 2}, ALONE]
    on_ranks(2, relay, layouts, tmp_path, "cpu")
    assert_same_as_alone(tmp_path, len(layouts))


def eight_bits(trainer: PolicyTrainer) -> list[Any]:
    state = trainer._optimizer.state_dict()
    return [state["masters"][0].tolist(), state["adamw"]["coded"][0]["first"].tolist()]


def go_on_as_copies(rank: int, folder: Path, runs: Path) -> list[Any]:
    eightbit_adamw.MIN_VALUES = 1000
    ranks = join(rank, folder, ParallelConfig(data=2))
    trainer = trainer_of(ranks, "8bit")
    trainer.load_state(runs / "step-1" / "trainer")
    found = eight_bits(trainer)
    write(trainer, ranks, runs / "step-2", 3)
    leave_ranks()
    return found


def test_eight_bit_states_are_read_by_any_number_of_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eightbit_adamw, "MIN_VALUES", 1000)
    alone = trainer_of(None, "8bit")
    step(alone, None, 1)
    expected = eight_bits(alone)
    write(alone, None, tmp_path / "step-1", 2)
    assert on_ranks(2, go_on_as_copies, tmp_path) == [expected] * 2
    again = trainer_of(None, "8bit")
    again.load_state(tmp_path / "step-2" / "trainer")
    assert eight_bits(again) == expected


def refused(rank: int, folder: Path, runs: Path) -> str:
    ranks = join(rank, folder, ParallelConfig(shard=2))
    with pytest.raises(UserError) as refusal:
        trainer_of(ranks, "8bit").load_state(runs / "trainer")
    leave_ranks()
    return str(refusal.value)


def test_states_that_can_not_be_cut_need_their_layout(tmp_path: Path) -> None:
    alone = trainer_of(None, "8bit")
    step(alone, None, 1)
    write(alone, None, tmp_path / "step-1", 2)
    for sentence in on_ranks(2, refused, tmp_path / "step-1"):
        assert sentence == (
            "a checkpoint with trainer.optimizer_states=8bit must be read in the layout that wrote it (one rank) or with "
            "another number of copies (trainer.parallel.data), got shard=2; only float32 and cpu can be loaded in another layout"
        )
