import numpy as np

from penstock.engines.embedded.noise import exponentials, streams


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_a_number_depends_on_seed_place_and_cell_alone() -> None:
    alone = exponentials(streams(words(7), words(3)), np.arange(5, dtype=np.uint64))
    among = exponentials(streams(words(1, 7, 2**64 - 1), words(9, 3, 0)), np.arange(2, 9, dtype=np.uint64))
    np.testing.assert_array_equal(alone[0, 2:], among[1, :3])


def test_seed_place_and_cell_each_change_it() -> None:
    base = exponentials(streams(words(7, 8, 7), words(3, 3, 4)), np.arange(4, dtype=np.uint64))
    assert len(np.unique(base)) == base.size


def test_numbers_are_exponential_and_positive() -> None:
    rows = np.arange(400, dtype=np.uint64)
    values = exponentials(streams(rows, rows), np.arange(500, dtype=np.uint64)).ravel()
    assert values.min() > 0
    assert abs(values.mean() - 1) < 0.01
    assert abs(values.var() - 1) < 0.02
    levels = np.exp(-np.quantile(values, [0.1, 0.5, 0.9]))
    np.testing.assert_allclose(levels, [0.9, 0.5, 0.1], atol=0.005)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_cells_may_differ_by_row() -> None:
    stream = streams(words(1, 2), words(0, 0))
    cells = np.array([[4, 5], [6, 4]], dtype=np.uint64)
    plain = exponentials(stream, np.arange(8, dtype=np.uint64))
    np.testing.assert_array_equal(exponentials(stream, cells), [plain[0, [4, 5]], plain[1, [6, 4]]])
