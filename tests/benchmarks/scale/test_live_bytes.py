import torch
from torch._subclasses import FakeTensorMode

from benchmarks.scale.live_bytes import live_bytes


def test_every_storage_counts_once_and_what_was_given_back_not_at_all() -> None:
    with FakeTensorMode():
        fake = torch.zeros(7)
    before = live_bytes(())
    weight = torch.nn.Parameter(torch.zeros(1000))
    view = weight.detach()[10:20]
    assert live_bytes(()) - before == 4000
    weight.sum().backward()  # type: ignore[no-untyped-call]
    state = {"adamw": [{"exp_avg": torch.zeros(500)}]}
    assert live_bytes([weight], state) - before == 4000 + 4000 + 2000
    weight.grad = None
    state["adamw"][0]["exp_avg"].untyped_storage().resize_(0)
    assert live_bytes([weight], state) - before == 4000
    del view, fake
