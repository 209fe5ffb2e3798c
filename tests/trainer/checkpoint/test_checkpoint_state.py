import pytest
import torch

from penstock.trainer.checkpoint import host_copies
from penstock.trainer.checkpoint.checkpoint_state import take_state
from penstock.trainer.checkpoint.host_copies import HostCopier


def test_state_and_weights_are_of_the_moment() -> None:
    weight, moment = torch.ones(3), torch.zeros(3)
    state = take_state(HostCopier(), {"step": 4, "moments": [moment], "master": weight}, {"w": weight})
    assert not state.is_live
    assert state.copies is not None
    state.copies.wait_before_update()
    weight.add_(1)
    moment.add_(1)
    assert [one.tolist() for one in state.tensors] == [[0.0] * 3, [1.0] * 3]
    assert state.weights["w"].tolist() == [1.0] * 3
    assert state.weights["w"].data_ptr() == state.tensors[1].data_ptr()  # a float32 master is the weight
    assert state.plain["dict"][0] == ["step", 4]


def test_without_room_it_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "available_bytes", lambda: 1)
    weight = torch.ones(3)
    state = take_state(HostCopier(), {"master": weight}, {"w": weight})
    assert state.is_live
    assert state.weights["w"] is state.tensors[0] is weight
    state.wait()
