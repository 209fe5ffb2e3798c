import pytest

from penstock.errors import UserError
from penstock.models import matmul_check as products


def in_float32(left, right):
    """This CPU may have no bfloat16 products of its own."""
    return (left.float() @ right.float()).bfloat16()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(products, "INNER", 64)
    monkeypatch.setattr(products, "WIDTH", 96)


def test_right_products_pass():
    products.check_products("cpu", in_float32)


@pytest.mark.parametrize("fault", [float("nan"), 1.1])
def test_products_wrong_at_one_size_are_refused(fault, monkeypatch):
    monkeypatch.setenv(products.LIMIT, "60")

    def wrong(left, right):
        return in_float32(left, right) * (fault if len(left) == 512 else 1.0)

    with pytest.raises(UserError, match=r"products on cpu are wrong \(512 x 64 .*PERCENTAGE is 60: unset it"):
        products.check_products("cpu", wrong)
