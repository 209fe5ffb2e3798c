import torch
from torch import nn

from penstock.models.published import published_tensors, wire_dtypes


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("score_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.score_bias = nn.Buffer(torch.zeros(3))
        self.steps = nn.Buffer(torch.tensor(7))
        self.inner = nn.Module()
        self.inner.register_buffer("inv_freq", torch.ones(2), persistent=False)


def test_parameters_and_persistent_buffers_are_published_and_tied_ones_once() -> None:
    model = Router()
    tensors = published_tensors(model)
    assert list(tensors) == ["embed.weight", "score_bias", "steps"]
    assert tensors["score_bias"] is model.score_bias


def test_what_a_model_keeps_in_float32_travels_in_float32() -> None:
    assert wire_dtypes(Router(), torch.bfloat16) == {
        "embed.weight": torch.bfloat16,
        "score_bias": torch.float32,
        "steps": torch.int64,
    }
