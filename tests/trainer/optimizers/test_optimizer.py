import copy

import pytest
import torch

from penstock.errors import UserError
from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizers.optimizer import MasterAdamW, learning_rate_at


def rates(total, **options):
    config = TrainerConfig(learning_rate=1.0, **options)
    return [learning_rate_at(step, total, config) for step in range(1, total + 1)]


def test_schedules_follow_their_formulas():
    assert rates(4) == [1, 1, 1, 1]
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1]
    assert rates(4, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates(6, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(
        [0.5, 1, 1, 0.8, 0.6, 0.4]
    )
    assert rates(4, schedule="cosine") == pytest.approx([1, 0.8535534, 0.5, 0.1464466], abs=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_every_step_trains_and_the_peak_is_reached(schedule, warmup_steps):
    assert rates(1, schedule=schedule) == [1.0]
    found = rates(10, schedule=schedule, warmup_steps=warmup_steps)
    assert found[warmup_steps] == max(found) == 1.0
    assert min(found) > 0


def test_a_schedule_that_is_overrun_stays_at_its_end():
    config = TrainerConfig(learning_rate=1.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate_at(50, 10, config) == pytest.approx(0.1)


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def backward(model, scale=1.0):
    (model(torch.ones(1, 3, dtype=model.weight.dtype)).float().sum() * scale).backward()


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_equals_torch_adamw_with_clipping(states):
    """Tensors as small as these keep float32 moments in every mode."""
    ours, theirs = linear(), linear()
    optimizer = MasterAdamW(ours, TrainerConfig(max_grad_norm=0.5, weight_decay=0.1, optimizer_states=states))
    plain = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for _ in range(3):
        backward(ours)
        optimizer.update(0.01, optimizer.gradient_norm())
        backward(theirs)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


class Student(torch.nn.Module):
    """A regression with matrices that are large enough to be coded. It computes in float32 from weights of any
    dtype: some machines can't multiply in bfloat16."""

    def __init__(self, seed, width=80):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.outer = torch.nn.Linear(64, width), torch.nn.Linear(width, 64)

    def forward(self, inputs):
        for layer in (self.inner, self.outer):
            inputs = torch.nn.functional.linear(inputs, layer.weight.float(), layer.bias.float())
            inputs = torch.tanh(inputs) if layer is self.inner else inputs
        return inputs

    def loss(self, teacher):
        inputs = torch.randn(32, 64)
        return (self(inputs) - teacher(inputs).detach()).square().mean()


def learn(steps=200, betas=(0.9, 0.95), **options):
    """The mean loss of the last tenth of the steps, and the student."""
    teacher, student = Student(1), Student(2)
    optimizer = MasterAdamW(student, TrainerConfig(betas=betas, weight_decay=0.01, **options))
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        loss = student.loss(teacher)
        loss.backward()
        optimizer.update(3e-3, optimizer.gradient_norm())
        losses.append(loss.item())
    return sum(losses[-steps // 10 :]) / (steps // 10), losses[0], student


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_eight_bits_learn_as_well_as_float32(betas):
    exact, first, _ = learn(betas=betas)
    coded, _, _ = learn(betas=betas, optimizer_states="8bit")
    assert exact < first / 4
    assert coded == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_on_the_cpu_change_no_bit(dtype, monkeypatch):
    """Also when tensors are cut and buckets hold several."""
    monkeypatch.setattr("penstock.trainer.optimizers.host_adamw.BUCKET_VALUES", 1000)
    _, _, one = learn(steps=10, dtype=dtype)
    _, _, other = learn(steps=10, dtype=dtype, optimizer_states="cpu")
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.dtype == theirs.dtype == getattr(torch, dtype)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_a_saved_state_goes_on_exactly(states, dtype):
    config = TrainerConfig(dtype=dtype, optimizer_states=states)
    teacher, first, second = Student(1), Student(2), Student(4)
    one, other = MasterAdamW(first, config), MasterAdamW(second, config)

    def step(student, optimizer, seed):
        torch.manual_seed(seed)
        student.loss(teacher).backward()
        optimizer.update(1e-2, optimizer.gradient_norm())

    for seed in range(3):
        step(first, one, seed)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for student, optimizer in ((first, one), (second, other)):
        step(student, optimizer, 9)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_of_another_mode_is_refused():
    state = MasterAdamW(linear(), TrainerConfig(optimizer_states="8bit")).state_dict()
    with pytest.raises(UserError, match="optimizer_states must be 8bit, .* got float32"):
        MasterAdamW(linear(), TrainerConfig()).load_state_dict(state)


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_parameters_without_a_gradient_stay(states):
    model = torch.nn.ModuleList([torch.nn.Linear(80, 80), torch.nn.Linear(80, 80)])
    optimizer = MasterAdamW(model, TrainerConfig(dtype="bfloat16", weight_decay=1.0, optimizer_states=states))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (model[0].weight.sum() + model[0].bias.sum()).backward()
    optimizer.update(0.1, optimizer.gradient_norm())
    after = list(model.parameters())
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert torch.equal(after[3], before[3])


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_gradient_norm_and_forgetting(states):
    model = linear()
    optimizer = MasterAdamW(model, TrainerConfig(optimizer_states=states))
    assert optimizer.gradient_norm() == 0.0
    backward(model, 2.0)
    assert optimizer.gradient_norm() == pytest.approx((8 * 4) ** 0.5)
    optimizer.forget()
    assert model.weight.grad is None
    assert optimizer.gradient_norm() == 0.0


@pytest.mark.parametrize("states", ["float32", "8bit", "cpu"])
def test_bfloat16_gradients_add_up_in_float32(states):
    """256 + 1 is 256 in bfloat16: only float32 accumulation keeps the ones."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = MasterAdamW(model, TrainerConfig(dtype="bfloat16", optimizer_states=states))
    assert model.weight.dtype == torch.bfloat16
    for scale in (256.0, 1.0, 1.0):
        (model.weight.sum() * scale).backward()
    assert optimizer.gradient_norm() == 258.0


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="nothing to train"):
        MasterAdamW(linear().requires_grad_(False), TrainerConfig())
