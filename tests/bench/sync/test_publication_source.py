import torch

from penstock.bench.sync.publication_source import Poked, Trained, make_source
from penstock.bench.sync.update_arm import UpdateArm


def test_a_poked_tensor_changes_in_one_value() -> None:
    weights = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    source = make_source(UpdateArm(transport="http"), None, weights, base=-1)
    assert isinstance(source, Poked)
    source.change(5)
    assert weights["a"].tolist() == [[0.0, 5.0], [0.0, 0.0]]
    assert weights["b"].tolist() == [0.0, 0.0, 0.0]


def test_trained_weights_move_by_the_learning_rate_in_one_direction() -> None:
    source = make_source(
        UpdateArm(transport="http", selection="delta"), None, {"a": torch.zeros(50).bfloat16()}, base=-1
    )
    assert isinstance(source, Trained)
    before = source.tensors["a"].detach().clone()
    for step in range(10):
        source.change(step)
    moved = (source.tensors["a"].detach() - before).abs()
    torch.testing.assert_close(moved, torch.full((50,), 10e-6), rtol=1e-3, atol=0)
    assert source.publishing.dtypes == {"a": torch.bfloat16}


def test_an_adapter_is_published_above_the_weights_that_are_there() -> None:
    model = torch.nn.Module()
    model.q_proj = torch.nn.Linear(4, 6, bias=False)
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    arm = UpdateArm(transport="http", selection="adapter", rank=2)
    source = make_source(arm, model, {}, base=7)
    assert {name: tuple(tensor.shape) for name, tensor in source.tensors.items()} == {
        "q_proj.lora_A.weight": (2, 4),
        "q_proj.lora_B.weight": (6, 2),
    }
    assert (source.publishing.base, source.publishing.selection) == (7, "adapter")
