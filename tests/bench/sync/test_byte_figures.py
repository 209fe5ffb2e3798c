import torch

from penstock.bench.shapes import make_shape
from penstock.bench.sync.byte_figures import measure_adapter, measure_delta
from penstock.models.published import published_tensors


def test_deltas_and_adapters_are_smaller_than_full_weights() -> None:
    model = make_shape("tiny", "cpu", torch.bfloat16)
    weights = {name: tensor.detach() for name, tensor in published_tensors(model).items()}
    delta = measure_delta(weights)
    assert delta["full_bytes"] == sum(weight.nbytes for weight in weights.values())
    assert 0 < delta["one_step_fraction"] < delta["fraction"] <= 0.2
    adapter = measure_adapter(model, weights, rank=4)
    assert adapter["bytes"] == 2 * 9728  # 9,728 numbers of 2 bytes
    assert adapter["fraction"] == adapter["bytes"] / delta["full_bytes"]
