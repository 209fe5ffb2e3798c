import numpy as np
import pytest

from tests.triton_device import DEVICE  # noqa: F401

from penstock.engines.embedded.cuda import decode_buffers as buffers  # isort: skip
from penstock.engines.embedded.cuda.decode_rows import ON_DEVICE, Rows, settings_of  # isort: skip
from penstock.engines.embedded.sequence import sequence_of
from tests.engines.contract import ask

SCRATCH = 99
SLOTS = {"policy": 0, "other": 1}


def seq(name, tokens=(1, 2, 3), blocks=(7,), seed=5, **options):
    made = sequence_of(ask(name, list(tokens), **options), arrival=0, max_context=64, seed=seed)
    made.blocks, made.is_running = list(blocks), True
    return made


def make_rows(count=4):
    rows = Rows(count, 6, SCRATCH, 4, 61, SLOTS)
    rows.clear()
    return rows


def test_a_row_holds_its_sequence_and_others_stand_on_scratch():
    rows, one = make_rows(), seq("a", tokens=[4, 5, 6, 7, 8], blocks=[3, 9])
    rows.place([one])
    assert rows.of[one] == 0
    assert rows.ints[buffers.POSITION].tolist() == [4, 0, 0, 0]
    assert rows.tokens.tolist() == [8, ON_DEVICE, ON_DEVICE, ON_DEVICE]
    assert rows.begins.tolist() == [1, 0, 0, 0]
    assert rows.tables[0].tolist() == [3, 9] + [SCRATCH] * 4
    assert (rows.tables[1:] == SCRATCH).all()


def test_a_sequence_keeps_its_row_and_shows_new_blocks_only():
    rows, one, two = make_rows(), seq("a"), seq("b", blocks=[8])
    rows.place([one, two])
    rows.launched()
    assert rows.tokens.tolist() == [ON_DEVICE] * 4
    two.num_pending, two.blocks = 3, [8, 11]
    rows.place([two])
    assert rows.of == {two: 1}
    assert rows.ints[buffers.POSITION].tolist() == [0, 5, 0, 0]
    assert rows.tables[1].tolist() == [8, 11] + [SCRATCH] * 4
    assert (rows.tables[0] == SCRATCH).all()
    assert rows.begins.tolist() == [0] * 4


def test_the_lowest_free_row_is_taken_first():
    rows, several = make_rows(), [seq(name) for name in "abcd"]
    rows.place(several)
    rows.place([several[0], several[3]])
    late = seq("e")
    assert rows.take(late, ON_DEVICE) == 1
    with pytest.raises(IndexError):
        rows.take(seq("f"), 1), rows.take(seq("g"), 1)


def test_compacting_moves_everything_that_belongs_to_a_row():
    rows = make_rows()
    several = [seq(name, seed=number, blocks=[number]) for number, name in enumerate("abcd")]
    rows.place(several)
    rows.place([several[1], several[3]])
    assert rows.compact().tolist() == [1, 3]
    assert [rows.of[several[1]], rows.of[several[3]]] == [0, 1]
    assert rows.used == 2
    assert rows.ints[buffers.SEED].tolist() == [1, 3, 0, 0]
    assert rows.tables[:, 0].tolist() == [1, 3, SCRATCH, SCRATCH]
    assert rows.take(seq("e"), ON_DEVICE) == 2


def test_rows_of_sequences_that_left_are_dropped():
    rows, one, two = make_rows(), seq("a"), seq("b")
    rows.place([one, two])
    one.is_running = False
    rows.drop_ended()
    assert list(rows.of) == [two]


def test_settings_of_a_request():
    made = seq("a", seed=2**63 + 7, temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, stop_token_ids=(4, 6))
    ints, floats = settings_of(made, 61, SLOTS)
    assert np.array(ints[buffers.SEED], dtype=np.int64).view(np.uint64) == 2**63 + 7
    assert ints[buffers.TOP_K] == 9
    assert ints[buffers.FIRST_STOP :] == [4, 6, -1, -1, -1, -1, -1, -1]
    assert floats == [0.5, 0.8, 0.1]


def test_greedy_draws_and_whole_vocabularies_are_not_truncated():
    ints, floats = settings_of(seq("a", temperature=0.0, top_k=9, top_p=0.8), 61, SLOTS)
    assert (ints[buffers.TOP_K], floats) == (0, [0.0, 1.0, 0.0])
    ints, _ = settings_of(seq("a", top_k=61), 61, SLOTS)
    assert ints[buffers.TOP_K] == 0


def test_more_stop_tokens_than_the_device_knows_are_left_to_the_host():
    ints, _ = settings_of(seq("a", stop_token_ids=tuple(range(9))), 61, SLOTS)
    assert ints[buffers.FIRST_STOP :] == [-1] * 8


def test_a_row_knows_its_policy_by_number():
    ints = [settings_of(seq("a", policy=policy), 61, SLOTS)[0] for policy in SLOTS]
    assert [row[buffers.POLICY] for row in ints] == [0, 1]
