import pytest

from penstock.engines.embedded.adapters.adapter_tensors import Target, largest_rank, split_name, targets_of
from penstock.errors import PenstockError
from penstock.records import TensorSpec, WeightUpdate


def update_with(**shapes: tuple[int, ...]) -> WeightUpdate:
    """Names are written with two underscores for a dot."""
    specs = tuple(
        TensorSpec(
            name=name.replace("__", "."), shape=shape, dtype="float32", bucket=0, offset=0, num_bytes=4
        )
        for name, shape in shapes.items()
    )
    return WeightUpdate(version=3, transport="none", tensors=specs, buckets=(), fingerprint={})


def test_layers_are_read_from_the_names() -> None:
    found = targets_of(
        update_with(
            x__q__lora_A__weight=(4, 8), x__q__lora_B__weight=(16, 4),
            y__lora_B__weight=(8, 2), y__lora_A__weight=(2, 6), y__lora_magnitude_vector=(8,),
        )
    )  # fmt: skip
    assert found == {
        "x.q": Target(rank=4, a="x.q.lora_A.weight", b="x.q.lora_B.weight"),
        "y": Target(rank=2, a="y.lora_A.weight", b="y.lora_B.weight", magnitude="y.lora_magnitude_vector"),
    }
    assert largest_rank(found.values()) == 4


def test_both_spellings_of_a_magnitude() -> None:
    assert split_name("a.b.lora_magnitude_vector") == ("a.b", "magnitude")
    assert split_name("a.b.lora_magnitude_vector.weight") == ("a.b", "magnitude")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "version 3 has no tensors"),
        ({"x__lora_A__weight": (4, 8)}, r"lora_B \(out, rank\) for x, got {'A': \(4, 8\)}"),
        (
            {"x__lora_A__weight": (4, 8), "x__lora_B__weight": (8, 3)},
            r"for x, got {'A': \(4, 8\), 'B': \(8, 3\)}",
        ),
        ({"x__lora_B__bias": (8,)}, "must end in lora_A.weight, .* got x.lora_B.bias"),
    ],
)
def test_what_no_adapter_of_linear_layers_has(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        targets_of(update_with(**shapes))
