from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from penstock.checksums import checksum_of
from penstock.models import tensor_file
from penstock.models.tensor_file import NAMES, write_tensors


def test_the_library_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    whole = torch.arange(60, dtype=torch.float32)
    tensors = {
        "view": whole[20:40],
        "turned": whole.view(6, 10).t(),
        "number": torch.tensor(7.0, dtype=torch.float64),
        "half": whole.to(torch.bfloat16).view(3, 20),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    path = tmp_path / "some.safetensors"
    assert write_tensors(path, tensors) == checksum_of(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    write_tensors(tmp_path / "one.safetensors", {"a": tensor})
    found = load_file(tmp_path / "one.safetensors")["a"]
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.float32), tensor.to(torch.float32))
