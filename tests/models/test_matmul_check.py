import pytest

from penstock.errors import UserError
from penstock.models import matmul_check


def in_float32(left, right):
    """This CPU may have no bfloat16 matmul of its own."""
    return (left.float() @ right.float()).bfloat16()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(matmul_check, "INNER", 64)
    monkeypatch.setattr(matmul_check, "WIDTH", 96)


def test_right_products_pass():
    matmul_check.check_matmul("cpu", in_float32)


@pytest.mark.parametrize("fault", [float("nan"), 1.1])
def test_products_wrong_at_one_size_are_refused(fault, monkeypatch):
    monkeypatch.setenv(matmul_check.LIMIT, "60")

    def wrong(left, right):
        return in_float32(left, right) * (fault if len(left) == 512 else 1.0)

    with pytest.raises(UserError, match=r"matmul on cpu is wrong \(512 x 64 .*PERCENTAGE is 60: unset it"):
        matmul_check.check_matmul("cpu", wrong)
