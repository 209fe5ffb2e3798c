import pytest
import torch

from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizer import MasterAdamW, learning_rate_at


def rates(total, **options):
    config = TrainerConfig(learning_rate=1.0, **options)
    return [learning_rate_at(step, total, config) for step in range(1, total + 1)]


def test_schedules_follow_their_formulas():
    assert rates(4) == [1, 1, 1, 1]
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1]
    assert rates(4, schedule="linear") == pytest.approx([0.75, 0.5, 0.25, 0])
    assert rates(6, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    )
    assert rates(4, schedule="cosine") == pytest.approx([0.8535534, 0.5, 0.1464466, 0], abs=1e-6)


def test_a_schedule_that_is_overrun_stays_at_its_end():
    config = TrainerConfig(learning_rate=1.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate_at(50, 10, config) == pytest.approx(0.1)


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def backward(model, scale=1.0):
    (model(torch.ones(1, 3, dtype=model.weight.dtype)).float().sum() * scale).backward()


def test_equals_torch_adamw_with_clipping():
    ours, theirs = linear(), linear()
    optimizer = MasterAdamW(ours, TrainerConfig(max_grad_norm=0.5, weight_decay=0.1))
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


def test_gradient_norm_and_forgetting():
    model = linear()
    optimizer = MasterAdamW(model, TrainerConfig())
    assert optimizer.gradient_norm() == 0.0
    backward(model, 2.0)
    assert optimizer.gradient_norm() == pytest.approx((8 * 4) ** 0.5)
    optimizer.forget()
    assert model.weight.grad is None


def test_bfloat16_gradients_add_up_in_float32():
    """256 + 1 is 256 in bfloat16: only float32 accumulation keeps the ones."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = MasterAdamW(model, TrainerConfig(dtype="bfloat16"))
    assert model.weight.dtype == torch.bfloat16
    for scale in (256.0, 1.0, 1.0):
        (model.weight.sum() * scale).backward()
    assert optimizer.gradient_norm() == 258.0


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="nothing to train"):
        MasterAdamW(linear().requires_grad_(False), TrainerConfig())
