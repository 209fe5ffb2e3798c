import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda.kernels.expert_record import record_decoded, record_packed  # isort: skip


def some_ids(rows: int, top_k: int, most: int) -> torch.Tensor:
    return torch.randint(0, most, (rows, top_k), generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize(("rows", "top_k", "dtype"), [(5, 2, torch.uint8), (70, 6, torch.int16)])
def test_tokens_of_prompts_are_written_into_their_slots(rows: int, top_k: int, dtype: torch.dtype) -> None:
    most = 256 if dtype == torch.uint8 else 512
    ids = some_ids(rows, top_k, most)
    record = torch.zeros(200, top_k, dtype=dtype, device=DEVICE)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:rows].to(DEVICE)
    chosen = record_packed(ids, record, slots=slots)
    assert torch.equal(chosen, ids)
    assert chosen.data_ptr() != ids.data_ptr()
    want = torch.zeros(200, top_k, dtype=torch.int64, device=DEVICE)
    want[slots] = ids
    assert torch.equal(record.long(), want)


def test_rows_that_decode_write_where_they_stand() -> None:
    rows, block_size = 40, 4
    ids = some_ids(rows, 3, 8)
    tables = torch.arange(rows * 2, dtype=torch.int32).flip(0).view(rows, 2).to(DEVICE)
    tables = torch.cat([tables, tables], dim=1)[:, :3]  # a longer table than is used, not contiguous
    positions = (torch.arange(rows) % 8).to(DEVICE)
    record = torch.zeros(rows * 2 * block_size, 3, dtype=torch.uint8, device=DEVICE)
    assert torch.equal(
        record_decoded(ids, record, tables=tables, positions=positions, block_size=block_size), ids
    )
    want = torch.zeros_like(record)
    for row in range(rows):
        place = int(positions[row])
        want[int(tables[row, place // block_size]) * block_size + place % block_size] = ids[row].to(
            torch.uint8
        )
    assert torch.equal(record, want)
