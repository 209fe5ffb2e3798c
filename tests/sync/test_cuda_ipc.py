import pytest
import torch

from penstock.sync.cuda_ipc import CudaIpcPublisher, Handle


def test_a_handle_survives_its_way_as_text() -> None:
    handle = Handle(
        size=12,
        offset=512,
        counter_offset=7,
        waits=True,
        memory=b"\x00:\xff",
        counter=b"/torch_1:2",
        event=b"",
    )
    assert Handle.decode(handle.encode()) == handle


def test_weights_on_a_cpu_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"cuda_ipc needs all weights on one GPU, got \['cpu'\]; use shared_memory"
    ):
        CudaIpcPublisher({"a": torch.ones(3)})
