"""A router's correction bias stays as it is in training, and what moves it is refused by name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.errors import FingerprintMismatch, UserError
from penstock.models.published import published_tensors
from penstock.records import StepPlan
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from penstock.trainer.fixed_buffers import FixedBuffers
from penstock.trainer.step.packing import plan_step
from tests.models.moe import moe_model
from tests.sync.contract import load, publish
from tests.trainer.builders import make_groups
from tests.trainer.test_policy_trainer import gradients_of, trainer_for

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
BIASES = {"deepseek-v3": "model.layers.1.mlp.gate", "ernie4.5-moe": "model.layers.1.mlp.gate.moe_statics"}
"""A buffer, and a parameter without gradient."""


class Moved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.correction_bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.bias = nn.Buffer(torch.zeros(2))
        self.register_buffer("frequencies", torch.ones(2), persistent=False)


def plan() -> StepPlan:
    return plan_step(1, make_groups(0), micro_batch_tokens=64)[0]


def test_what_is_left_alone_passes() -> None:
    model = Moved()
    model.bias[0] = torch.nan
    buffers = FixedBuffers(model)
    with torch.no_grad():
        model.weight.add_(1)
        model.frequencies.add_(1)
    model.bias = model.bias.clone()
    buffers.check()


@pytest.mark.parametrize("how", ["written", "through .data", "replaced", "reshaped"])
def test_a_buffer_with_other_values_is_refused_by_name(how: str) -> None:
    model = Moved()
    buffers = FixedBuffers(model)
    if how == "written":
        model.bias.add_(1)
    elif how == "through .data":
        model.bias.data[1] = 1.0
    else:
        model.bias = torch.ones(2) if how == "replaced" else torch.zeros(3)
    with pytest.raises(UserError, match=r"^bias of Moved must not change while it is trained"):
        buffers.check()
    buffers.remember()
    buffers.check()


def test_a_parameter_without_gradient_is_held_where_it_corrects_a_router() -> None:
    model = Moved()
    model.weight.requires_grad_(False)
    buffers = FixedBuffers(model)
    model.weight.data += 1
    buffers.check()
    model.correction_bias.data += 1
    with pytest.raises(UserError, match=r"^correction_bias of Moved"):
        buffers.check()


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", "ernie4.5-moe"])
def test_a_step_leaves_the_correction_bias_as_it_is(family: str) -> None:
    model = moe_model(family)
    before = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    trainer_for(model, learning_rate=0.1).step(plan())
    after = published_tensors(model)
    assert len(biases) == 2
    assert all(torch.equal(after[name], before[name]) for name in biases)
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", BIASES)
@pytest.mark.parametrize("when", ["in a forward pass", "between steps"])
def test_a_model_that_moves_its_bias_is_refused_before_its_weights_change(family: str, when: str) -> None:
    model = moe_model(family)
    path = BIASES[family]
    trainer = trainer_for(model, learning_rate=0.1)
    trainer.step(plan())

    def move(*_: object) -> None:
        model.get_submodule(path).e_score_correction_bias.data += 0.01

    if when == "between steps":
        move()
    else:
        model.register_forward_hook(move)
        model.model.register_forward_hook(move)  # whichever a packed row calls
    before = model.lm_head.weight.clone()
    kind = type(model).__name__
    with pytest.raises(UserError, match=rf"^{path}.e_score_correction_bias of {kind} must not change"):
        trainer.step(plan())
    assert torch.equal(model.lm_head.weight, before)


class WithoutBuffers(SharedMemoryReceiver):
    """Forgets what is no parameter."""

    def _copy(self, name: str, live: torch.Tensor, published: torch.Tensor) -> None:
        if not name.endswith("bias"):
            super()._copy(name, live, published)


def test_a_bias_reaches_the_engine_and_one_that_does_not_fails_the_update(tmp_path: Path) -> None:
    trained, served = (published_tensors(moe_model("deepseek-v3", seed=seed)) for seed in (0, 1))
    trained[BIAS].fill_(0.5)
    update = publish(SharedMemoryPublisher(trained, folder=tmp_path), 1, trained)
    with pytest.raises(FingerprintMismatch, match=rf"1 of {len(trained)} tensors .* \({BIAS}\)"):
        load(WithoutBuffers(), update, served)()
    load(SharedMemoryReceiver(), update, served)()
    assert served[BIAS].unique().tolist() == [0.5]


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "olmoe"])
def test_balancing_losses_are_off_whatever_the_model_says(family: str) -> None:
    asked = {"output_router_logits": True, "router_aux_loss_coef": 100.0}
    plain, balanced = (gradients_of(moe_model(family, **changes), plan()) for changes in ({}, asked))
    assert balanced[0]["loss"] == plain[0]["loss"]
    assert all(torch.equal(balanced[1][name], gradient) for name, gradient in plain[1].items())
