"""A model shaped as vLLM's are: joined projections, padded vocabularies, weights that are packed and freed."""

from typing import ClassVar

import torch
from torch import nn

from penstock.sync.fingerprint import fingerprints
from penstock.vllm_plugin.load_verifier import LoadVerifier


class Packing:
    """Frees the weights that it prepares."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(torch.empty(0))


class Layer(nn.Module):
    def __init__(self, rows: int, method: object | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 2))
        self.quant_method = method


class Attention(nn.Module):
    def __init__(self, method: object) -> None:
        super().__init__()
        self.qkv_proj = Layer(6, method)


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        method = Packing()
        self.attn = Attention(method)
        self.embed = Layer(8)
        self.norm = Layer(1)
        self.other = Layer(3, method)


TENSORS = {
    "attn.q_proj.weight": torch.randn(3, 2),
    "attn.k_proj.weight": torch.randn(1, 2),
    "attn.v_proj.weight": torch.randn(2, 2),
    "embed.weight": torch.randn(5, 2),
    "norm.weight": torch.randn(1, 2),
}


def load(model: Model) -> None:
    with torch.no_grad():
        joined = torch.cat([TENSORS[f"attn.{each}_proj.weight"] for each in "qkv"])
        model.attn.qkv_proj.weight.copy_(joined)
        model.embed.weight[:5] = TENSORS["embed.weight"]
        model.norm.weight.copy_(TENSORS["norm.weight"])


def verified(model: Model) -> dict[str, int]:
    verifier = LoadVerifier(model, {name: tuple(tensor.shape) for name, tensor in TENSORS.items()})
    with verifier.watching():
        load(model)
        for layer in (model.attn.qkv_proj, model.other):
            layer.quant_method.process_weights_after_loading(layer)
    return verifier.found


def test_every_tensor_is_found_in_the_layer_that_holds_it() -> None:
    model = Model()
    assert verified(model) == fingerprints(TENSORS)
    assert model.attn.qkv_proj.weight.numel() == 0
    assert "process_weights_after_loading" not in vars(model.attn.qkv_proj.quant_method)


def test_a_tensor_that_lies_elsewhere_has_another_fingerprint() -> None:
    packed = {"qkv_proj": ["k_proj", "q_proj", "v_proj"]}
    model = Model()
    model.packed_modules_mapping = packed
    found = verified(model)
    expected = fingerprints(TENSORS)
    wrong = {name for name in expected if found.get(name) != expected[name]}
    assert wrong == {"attn.q_proj.weight", "attn.k_proj.weight"}
