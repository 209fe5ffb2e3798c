from pathlib import Path

import pytest
import torch

from penstock.errors import UserError
from penstock.trainer.checkpoint import state_files
from penstock.trainer.checkpoint.state_files import load_state, save_state
from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizers.optimizer import MasterAdamW


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(80, 80)


def update(student: torch.nn.Module, optimizer: MasterAdamW, seed: int) -> None:
    torch.manual_seed(seed)
    student(torch.randn(4, 80, dtype=student.weight.dtype)).square().sum().backward()
    optimizer.update(1e-2, optimizer.gradient_norm())


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_goes_on_from_its_files_as_if_it_had_not_stopped(tmp_path, states, dtype):
    config = TrainerConfig(optimizer_states=states, dtype=dtype, weight_decay=0.1)
    first, second = model(0), model(1)
    one, other = MasterAdamW(first, config), MasterAdamW(second, config)
    for seed in range(3):
        update(first, one, seed)
    save_state(tmp_path, one.state_dict())
    other.load_state_dict(load_state(tmp_path))
    for student, optimizer in ((first, one), (second, other)):
        update(student, optimizer, 9)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_containers_and_numbers_come_back_as_they_were(tmp_path):
    state = {"a": {3: (1, 2.5, None), "b": [True, "text", []]}, "empty": {}}
    save_state(tmp_path, state)
    assert load_state(tmp_path) == state


def test_large_states_are_cut_into_files_and_views_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "SHARD_BYTES", 160)
    whole = torch.arange(60, dtype=torch.float32)
    tensors = [whole[:20], whole[20:40], whole.view(6, 10).t(), torch.tensor(7.0)]
    save_state(tmp_path, tensors)
    assert len(list(tmp_path.glob("tensors-*.safetensors"))) == 3
    for mine, theirs in zip(load_state(tmp_path), tensors, strict=True):
        assert torch.equal(mine, theirs)


def test_what_needs_pickling_is_refused(tmp_path):
    with pytest.raises(TypeError, match="got object"):
        save_state(tmp_path, {"a": object()})


def test_a_state_that_is_no_object_is_refused(tmp_path: Path):
    (tmp_path / "state.json").write_text("3")
    for read in (load_state, state_files.read_tree):
        with pytest.raises(UserError, match=r"state.json must hold an object, got 3"):
            read(tmp_path)


def test_a_broken_file_is_one_sentence(tmp_path: Path):
    save_state(tmp_path, {"a": torch.ones(3)})
    (tmp_path / "tensors-0.safetensors").write_bytes(b"none")
    with pytest.raises(UserError, match="can't be read .* remove this checkpoint"):
        load_state(tmp_path)
