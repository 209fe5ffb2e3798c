import copy

import pytest
import torch

from penstock.engines.embedded.adapters.adapter_serving import Place
from penstock.engines.embedded.adapters.adapter_tensors import Target
from penstock.engines.embedded.adapters.merged import MergedAdapter, merge
from penstock.errors import PenstockError
from penstock.records import AdapterSpec
from tests.engines.embedded.adapters.peft_models import ATTENTION, World, make_adapter
from tests.engines.embedded.tiny import make_model

TARGET = Target(rank=2, a="a", b="b")


def place(**tensors):
    return Place(1, tensors)


def test_the_sum_is_made_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(*size, generator=generator).bfloat16() for size in ((6, 5), (2, 5), (6, 2)))
    merged = merge(base, AdapterSpec(rank=2, alpha=1.0), TARGET, place(a=a, b=b))
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged, base.float() + 0.5 * b.float() @ a.float())


def test_with_dora_every_row_has_its_magnitude() -> None:
    generator = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(*size, generator=generator) for size in ((6, 5), (2, 5), (6, 2)))
    magnitude = torch.arange(1.0, 7.0)
    target = Target(rank=2, a="a", b="b", magnitude="m")
    merged = merge(base, AdapterSpec(rank=2, alpha=4.0, dora=True), target, place(a=a, b=b, m=magnitude))
    torch.testing.assert_close(merged.norm(dim=1), magnitude)
    direction = base + 2 * b @ a
    torch.testing.assert_close(
        merged / merged.norm(dim=1, keepdim=True), direction / direction.norm(dim=1, keepdim=True)
    )


def test_an_adapter_that_is_taken_off_leaves_the_weights_bitwise() -> None:
    base, world = make_model("llama"), World()
    model = copy.deepcopy(base)
    adapter = MergedAdapter(model)
    for seed, targets in ((1, "all-linear"), (2, ATTENTION)):
        update = world.adapter(make_adapter(base, seed, targets=targets), seed)
        adapter.check(update)
        where = adapter.open(update)
        world.receiver.load(world.receiver.stage(update), where.tensors)()
        adapter.settle(update, where)
    changed = [
        name for name, weight in model.named_parameters() if not torch.equal(weight, base.get_parameter(name))
    ]
    assert changed == [name for name, _ in base.named_parameters() if name.split(".")[-2] in ATTENTION]
    adapter.take_off("policy")
    assert all(torch.equal(weight, base.get_parameter(name)) for name, weight in model.named_parameters())
    assert adapter.policies == ()


def test_dora_without_magnitudes_is_refused() -> None:
    base, world = make_model("llama"), World()
    made = make_adapter(base, 1, use_dora=True)
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if "magnitude" not in name}
    with pytest.raises(PenstockError, match="DoRA needs lora_magnitude_vector for model.layers.0"):
        MergedAdapter(base).check(world.adapter(made, 1))


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("lora_A.weight", (4, 31), r"must be A \(4, 32\), B \(32, 4\), magnitude \(32,\), got A \(4, 31\)"),
        ("lora_B.weight", (33, 4), r"got A \(4, 32\), B \(33, 4\), magnitude \(32,\)"),
        ("lora_magnitude_vector", (1, 32), r"got A \(4, 32\), B \(32, 4\), magnitude \(1, 32\)"),
    ],
)
def test_matrices_that_do_not_fit_their_layer_are_refused(
    part: str, shape: tuple[int, ...], message: str
) -> None:
    base, world = make_model("llama"), World()
    made = make_adapter(base, 1, use_dora=True)
    made.tensors[f"model.layers.0.self_attn.q_proj.{part}"] = torch.zeros(shape)
    with pytest.raises(PenstockError, match=message):
        MergedAdapter(base).check(world.adapter(made, 1))
