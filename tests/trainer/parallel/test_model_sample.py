import torch

from penstock.trainer.parallel.model_sample import sample_of
from tests.trainer.builders import tiny_model


def test_another_shape_or_other_values_have_another_sample() -> None:
    model = tiny_model("llama")
    assert sample_of(model) == sample_of(tiny_model("llama"))
    assert sample_of(model) != sample_of(tiny_model("llama", seed=1))
    assert sample_of(model) != sample_of(tiny_model("llama", num_hidden_layers=1))
    before = sample_of(model)
    with torch.no_grad():
        model.lm_head.weight += 1e-4
    assert sample_of(model) != before
