import torch

from penstock.bench.random_adapter import ATTENTION, random_adapter
from penstock.bench.shapes import make_shape


def test_every_linear_layer_but_the_head_or_those_that_are_named() -> None:
    model = make_shape("tiny", "cpu", torch.float32)
    spec, tensors = random_adapter(model, 4)
    assert (spec.rank, spec.scale) == (4, 2.0)
    assert len(tensors) == 2 * 2 * 7
    assert not any("lm_head" in name for name in tensors)
    assert tensors["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 192)
    assert tensors["model.layers.1.mlp.down_proj.lora_B.weight"].shape == (64, 4)
    _, attention = random_adapter(model, 4, ends=ATTENTION)
    assert len(attention) == 2 * 2 * 4
    _, again = random_adapter(model, 4)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
