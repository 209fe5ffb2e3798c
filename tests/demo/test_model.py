"""The built-in model's cache: made once, atomically, and never used half-written."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from penstock.demo import supervised_start as builtin_training
from penstock.demo.model import (
    MANIFEST,
    RECIPES,
    MixtureRecipe,
    Recipe,
    ensure_builtin_model,
    is_complete,
    open_builtin,
)

pytestmark = pytest.mark.processes

TINY = Recipe(
    hidden_size=16, num_layers=1, num_heads=2, mlp_size=16, max_steps=3, batch=4, min_exact=0.0, max_exact=1.0
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_builtin_model(tmp_path_factory.mktemp("cache"), recipe=TINY, threads=1)


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A cache of its own for the test, with the model in it."""
    shutil.copytree(made, tmp_path / made.name)
    return tmp_path


def count_trainings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders: list[Path] = []
    original = builtin_training.train_and_save

    def counting(recipe: Recipe, folder: Path, **kwargs: object) -> None:
        folders.append(folder)
        original(recipe, folder, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtin_training, "train_and_save", counting)
    return folders


def test_it_loads_as_any_model_does(made: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made)
    assert tokenizer("214+387=")["input_ids"] == [2, 1, 4, 10, 3, 8, 7, 11]
    assert tokenizer.decode([6, 0, 1, 12], skip_special_tokens=True) == "601"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (12, 13, None)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 12
    assert model.config.vocab_size == len(tokenizer) == 14


def test_a_mixture_of_experts_is_made_by_the_same_lesson(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = MixtureRecipe(**dataclasses.asdict(TINY) | {"mlp_size": 8})
    folder = ensure_builtin_model(tmp_path, recipe=recipe, threads=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (8, 2)
    assert model.model.layers[0].mlp.experts.down_proj.shape == (8, 16, 8)
    assert recipe.key() != TINY.key()


def test_only_built_in_names_are_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "builtin", TINY)
    assert open_builtin("builtin", cache, log=print) == str(cache / f"arithmetic-{TINY.key()}")
    assert open_builtin("Qwen/Qwen3-0.6B", cache, log=print) == "Qwen/Qwen3-0.6B"


def test_a_cached_model_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = count_trainings(monkeypatch)
    lines: list[str] = []
    folder = ensure_builtin_model(cache, recipe=TINY, log=lines.append)
    assert folder == cache / f"arithmetic-{TINY.key()}"
    assert trainings == []
    assert lines == []


def test_another_recipe_is_another_model(cache: Path) -> None:
    other = dataclasses.replace(TINY, seed=9)
    lines: list[str] = []
    folder = ensure_builtin_model(cache, recipe=other, log=lines.append, threads=1)
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        [f"arithmetic-{TINY.key()}", f"arithmetic-{other.key()}"]
    )
    assert json.loads((folder / MANIFEST).read_text())["recipe"]["seed"] == 9
    assert lines[0] == (
        f"making the built-in model, once, in 20 to 30 s of a core: it learns to add unsurely; in {folder}"
    )
    assert lines[1].startswith("built-in model: step 3, loss ")


def test_the_same_recipe_gives_the_same_weights(made: Path, tmp_path: Path) -> None:
    again = ensure_builtin_model(tmp_path, recipe=TINY, threads=1)
    assert (again / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


@pytest.mark.parametrize("damage", ["manifest", "weights", "shorter"])
def test_a_damaged_model_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    folder = cache / f"arithmetic-{TINY.key()}"
    if damage == "manifest":
        (folder / MANIFEST).unlink()
    elif damage == "weights":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "model.safetensors").write_bytes(b"half")
    assert not is_complete(folder)
    trainings = count_trainings(monkeypatch)
    assert ensure_builtin_model(cache, recipe=TINY, threads=1) == folder
    assert len(trainings) == 1
    assert is_complete(folder)
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_a_failed_making_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: Recipe, folder: Path, **kwargs: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin_training, "train_and_save", fail)
    with pytest.raises(KeyboardInterrupt):
        ensure_builtin_model(tmp_path, recipe=TINY)
    assert list(tmp_path.iterdir()) == []


def test_of_two_makers_the_first_to_finish_wins(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rival finishes while we are still training."""
    final = tmp_path / made.name

    def overtaken(recipe: Recipe, folder: Path, **kwargs: object) -> None:
        shutil.copytree(made, final)
        (final / "rival").write_text("was here first")
        (folder / "config.json").write_text("ours")

    monkeypatch.setattr(builtin_training, "train_and_save", overtaken)
    assert ensure_builtin_model(tmp_path, recipe=TINY) == final
    assert (final / "rival").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [made.name]


def test_this_module_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import penstock.demo.model, penstock.models.tokenizer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
