import pytest

from penstock.models.compilation import COMPILED_FROM, is_worth_compiling


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [
        ("cuda", COMPILED_FROM, True),
        ("cuda:1", COMPILED_FROM - 1, False),
        ("cpu", 10 * COMPILED_FROM, False),
    ],
)
def test_large_models_on_a_gpu_are_compiled(device: str, count: int, expected: bool) -> None:
    assert is_worth_compiling(device, count) is expected
