import pytest
import torch

from penstock.engines.vllm.native_packing import Chunk, described, ipc_chunks, nccl_chunks
from penstock.errors import PenstockError

SIZES = (40, 40, 16, 100, 8, 8)


def tensors() -> Chunk:
    return [(str(number), torch.zeros(size // 4)) for number, size in enumerate(SIZES)]


def names(chunks: list[Chunk]) -> list[str]:
    return ["".join(name for name, _ in chunk) for chunk in chunks]


@pytest.mark.parametrize(
    ("limit", "nccl", "ipc"),
    [
        (1000, ["012345"], ["012345"]),
        (120, ["0123", "45"], ["012", "345"]),
        (100, ["0123", "45"], ["012", "3", "45"]),
    ],
)
def test_chunks_end_after_or_before_the_limit(limit: int, nccl: list[str], ipc: list[str]) -> None:
    assert names(list(nccl_chunks(tensors(), limit))) == nccl
    assert names(list(ipc_chunks(tensors(), limit))) == ipc


@pytest.mark.parametrize(("limit", "nccl"), [(80, ["012", "3", "45"]), (79, ["01", "23", "45"])])
def test_a_chunk_that_just_fills_the_limit_goes_on(limit: int, nccl: list[str]) -> None:
    assert names(list(nccl_chunks(tensors(), limit))) == nccl


def test_a_tensor_that_no_buffer_holds_is_refused() -> None:
    with pytest.raises(PenstockError, match="3 has 100 bytes, and the buffer for it 60"):
        list(ipc_chunks(tensors(), 60))


def test_a_chunk_is_described_by_name_format_and_shape() -> None:
    assert described([("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))]) == {
        "names": ["a", "b"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[2, 3], [4]],
    }
