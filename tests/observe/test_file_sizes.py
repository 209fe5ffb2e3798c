import pytest

from penstock.observe.file_sizes import file_size


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(0, "0 bytes"), (812, "812 bytes"), (41_300, "41 kB"), (3_190_000, "3.2 MB"), (1_500_000_000, "1.5 GB")],
)
def test_sizes_have_the_unit_that_fits(num_bytes: int, said: str) -> None:
    assert file_size(num_bytes) == said
