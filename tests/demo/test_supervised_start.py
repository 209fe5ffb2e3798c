"""The supervised start: what the teacher shows, what it never shows, and that the recipe works."""

import dataclasses
from pathlib import Path

import pytest
import torch

from penstock.demo import arithmetic
from penstock.demo import supervised_start as builtin_training
from penstock.demo.model import Recipe
from penstock.demo.supervised_start import (
    VOCABULARY,
    exact_probability,
    make_batch,
    train_and_save,
    training_pairs,
)
from penstock.errors import PenstockError

RECIPE = Recipe()


def text(ids: torch.Tensor) -> str:
    return "".join(VOCABULARY[index] for index in ids.tolist())


def batch_of(
    *pairs: tuple[int, int], recipe: Recipe = RECIPE, copies: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = make_batch(torch.tensor(list(pairs) * copies), recipe, torch.Generator().manual_seed(0))
    return batch.token_ids_BL, batch.target_BAV


def test_without_noise_the_teacher_writes_the_sum() -> None:
    ids, _ = batch_of((214, 387), (100, 449), recipe=dataclasses.replace(RECIPE, wrong_digit_share=0.0))
    assert [text(row) for row in ids] == ["214+387=601<eos>", "100+449=549<eos>"]


def test_the_teacher_errs_as_often_as_its_targets_say() -> None:
    ids, target = batch_of((214, 387), copies=4000)
    answers = ids[:, 8:11]
    right = (answers == torch.tensor([6, 0, 1])).float().mean().item()
    assert right == pytest.approx(1 - RECIPE.wrong_digit_share, abs=0.015)
    written = torch.nn.functional.one_hot(answers, len(VOCABULARY)).float().mean(dim=0)
    assert torch.allclose(written, target[0, :3], atol=0.03)
    assert torch.allclose(target.sum(dim=-1), torch.ones(4000, 4), atol=1e-5)
    assert target[0, 3, VOCABULARY.index("<eos>")] == 1


def test_the_teacher_never_shows_a_held_out_problem() -> None:
    """The model and the tasks are siblings that must not import each other, so the rule is written twice."""
    pairs = training_pairs(RECIPE)
    shown = {f"{a}+{b}=" for a, b in pairs.tolist()}
    held_out = {str(task.prompt) for task in arithmetic.make_tasks("heldout", size=10**6, seed=0)}
    trained = {str(task.prompt) for task in arithmetic.make_tasks("train", size=10**6, seed=0)}
    assert shown.isdisjoint(held_out)
    assert shown == trained


def test_the_probability_of_an_exact_answer() -> None:
    """A model that gives every token the same logit."""

    class Uniform(torch.nn.Module):
        def forward(self, ids: torch.Tensor, use_cache: bool) -> object:
            return type("Out", (), {"logits": torch.zeros(*ids.shape, len(VOCABULARY))})

    value = exact_probability(Uniform(), torch.tensor([[214, 387]]), RECIPE)
    assert value == pytest.approx(len(VOCABULARY) ** -4)


def test_a_start_out_of_range_is_tried_again_and_then_refused(tmp_path: Path) -> None:
    hopeless = Recipe(
        hidden_size=16, num_layers=1, num_heads=2, mlp_size=16, max_steps=1, batch=2, attempts=2
    )
    lines: list[str] = []
    before = torch.get_num_threads(), torch.random.get_rng_state()
    with pytest.raises(PenstockError, match=r"after 2 attempts .* must be in \[0.18, 0.35\]"):
        train_and_save(hopeless, tmp_path, log=lines.append, threads=1)
    assert sum("trying another seed" in line for line in lines) == 2
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert list(tmp_path.iterdir()) == []


def steps_logged(
    monkeypatch: pytest.MonkeyPatch, exact_at: dict[int, float], recipe: Recipe
) -> tuple[list[float], float]:
    """The learning rates that the schedule gives when the model becomes exact at the given steps."""
    rates: list[float] = []

    class Lesson:
        def __init__(self, *args: object) -> None: ...

        def take(self, lr: float) -> float:
            rates.append(lr)
            return 0.0

    monkeypatch.setattr(builtin_training, "_Lesson", Lesson)
    monkeypatch.setattr(builtin_training, "exact_probability", lambda *args: exact_at.get(len(rates), 0.0))
    pairs = torch.tensor([[214, 387]])
    _, exact = builtin_training._train(recipe, pairs, 0, lambda line: None)
    return rates, exact


def test_the_rate_falls_once_adding_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(lr=1.0, warmup_steps=2, check_steps=5, settle_steps=4, max_steps=100)
    rates, exact = steps_logged(monkeypatch, {5: 0.1, 10: 0.2, 14: 0.28}, recipe)
    assert rates == [0.5, *[1.0] * 9, 0.75, 0.5, 0.25, 0.02]
    assert exact == 0.28


def test_a_model_that_never_learns_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, exact = steps_logged(monkeypatch, {}, Recipe(lr=1.0, warmup_steps=1, max_steps=30))
    assert rates == [1.0] * 30
    assert exact == 0.0
