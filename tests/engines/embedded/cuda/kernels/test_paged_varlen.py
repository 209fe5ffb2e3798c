"""torch's kernels can't run on a CPU, so a stand-in with their documented meaning is put in their place."""

import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda.kernels import paged_varlen as varlen  # isort: skip
from tests.engines.embedded.cuda.kernels.reference import attend_paged  # isort: skip
from penstock.models.attention_options import AttentionOptions

QUERY = torch.zeros(3, 4, 16, dtype=torch.float16, device=DEVICE)
POOL = torch.zeros(2, 8, 2, 32, dtype=torch.float16, device=DEVICE)


def stand_in(shift=0, error=None):
    """`varlen_attn` as its documentation has it. `shift` moves its window, as a misreading would."""

    def varlen_attn(
        query, key, value, starts, starts_of_keys, max_q, max_k, *,
        scale, window_size, enable_gqa, seqused_k, block_table,
    ):  # fmt: skip
        assert starts_of_keys is None
        assert enable_gqa == (query.shape[1] != key.shape[2])
        if error is not None:
            raise error
        counts = (starts[1:] - starts[:-1]).tolist()
        assert max_q == max(counts)
        assert max_k == int(seqused_k.max())
        left, right = window_size
        assert right == 0
        window = None if left < 0 else left + 1 + shift
        return attend_paged(
            query, key, value, block_table, seqused_k.tolist(), counts,
            AttentionOptions(scaling=scale, sliding_window=window),
        )  # fmt: skip

    return varlen_attn


@pytest.fixture
def torch_has(monkeypatch):
    """Puts a stand-in in place; FA3 counts as active unless another name is given."""

    def use(varlen_attn, active="FA3"):
        monkeypatch.setattr(varlen, "_varlen", lambda: varlen_attn)
        monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: active, raising=False)
        varlen._agrees.cache_clear()

    yield use
    varlen._agrees.cache_clear()


def serves(window=None, softcap=None, sinks=None, query=QUERY, pool=POOL):
    options = AttentionOptions(scaling=1.0, sliding_window=window, softcap=softcap, sinks=sinks)
    return varlen.serves(query, pool, options)


def test_it_serves_what_torch_can_read_and_where_both_agree(torch_has):
    torch_has(stand_in())
    assert serves()
    assert serves(window=5)
    assert not serves(softcap=2.0)
    assert not serves(sinks=torch.zeros(4))
    assert not serves(query=QUERY.float(), pool=POOL.float())
    assert not serves(pool=POOL[..., :24])


def test_without_block_tables_or_a_flash_attention_that_pages_ours_serves(torch_has):
    torch_has(stand_in(), active=None)
    assert not serves()
    torch_has(None)
    assert not serves()


def test_a_kernel_that_refuses_or_disagrees_is_not_used(torch_has, caplog):
    torch_has(stand_in(error=RuntimeError("pages are for Hopper")))
    assert not serves()
    assert "pages are for Hopper" in caplog.text
    torch_has(stand_in(shift=1))
    assert serves()
    assert not serves(window=5)
    assert "off by" in caplog.text


def test_this_torch_names_what_we_ask_for():
    """From the version on that has block tables."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (varlen._varlen.__wrapped__() is not None) == (version >= (2, 12))
