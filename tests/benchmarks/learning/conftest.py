"""A small model that knows a few problems half by heart: reinforcement learning has something to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.learning.arms import Setup
from benchmarks.learning.token_sampler import Answers
from penstock.demo.arithmetic import make_tasks
from penstock.demo.model import MixtureRecipe, Recipe, ensure_builtin_model
from penstock.models.tokenizer import ChatTokenizer

NUM_TASKS, NUM_HELDOUT = 48, 16
QUICK: dict[str, Any] = {
    "max_steps": 2,
    "settle_steps": 1,
    "check_steps": 1,
    "learnt_share": 0.0,
    "warmup_steps": 1,
    "batch": 8,
    "hidden_size": 64,
    "min_exact": 0.0,
    "max_exact": 1.0,
}
RECIPE = Recipe(mlp_size=128, **QUICK)
MIXTURE = MixtureRecipe(mlp_size=32, **QUICK)


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adder(tmp_path_factory.mktemp("adder"), RECIPE)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adder(tmp_path_factory.mktemp("mixture"), MIXTURE)


def make_adder(folder: Path, recipe: Recipe) -> Path:
    folder = ensure_builtin_model(folder, recipe=recipe, threads=1)
    tasks = [
        *make_tasks("train", size=NUM_TASKS, seed=0),
        *make_tasks("heldout", size=NUM_HELDOUT, seed=0),
    ]
    memorise(folder, Answers.of(tasks, ChatTokenizer(str(folder))), until=0.3)
    return folder


def memorise(folder: Path, answers: Answers, until: float) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        logits = model(answers.rows[:, :-1]).logits[:, answers.start - 1 :]
        logprobs = logits.log_softmax(-1).gather(2, answers.rows[:, answers.start :, None]).sum(dim=(1, 2))
        if float(logprobs.detach().exp().mean()) > until:
            break
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture
def setup(adder: Path) -> Setup:
    return Setup(
        model=str(adder),
        steps=8,
        groups=4,
        group_size=4,
        warmup_steps=0,
        learning_rate=1e-3,
        eval_every=2,
        num_heldout=NUM_HELDOUT,
        num_tasks=NUM_TASKS,
    )
