"""Makes and caches the built-in models: a tiny Llama that adds two numbers unreliably, a mixture of experts that
does the same, and one that chats and may call a calculator.

`penstock train` without arguments needs a model offline. The tiny Llama learns three-digit addition from a
noisy teacher, which writes more than a third of all digits wrong. So its sampled answers are exact with a
probability of about 0.26, and reinforcement learning has something real to improve.

The recipe is data. Its hash names the cache folder, so a changed recipe makes a new model. This module
imports without torch; the training itself is in `supervised_start` and `tool_start`.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

MANIFEST = "penstock.json"
"""File that is written last, with the recipe and the size of every file. A folder that does not match it is not
used."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Holds all that decides which model comes out: shape, problems, teacher, schedule."""

    revision: int = 2
    """Raise it when a change of the code makes another model from the same recipe."""
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    mlp_size: int = 256
    max_context: int = 512
    rope_theta: float = 100.0
    init_std: float = 0.05
    low: int = 100
    high: int = 449
    """Operands are low..high, so that every sum has three digits."""
    held_out_modulus: int = 10
    """A prompt whose CRC-32 is a multiple of this is held out, here and in training."""
    wrong_digit_share: float = 0.36
    """How often the teacher writes a wrong digit, each of the other nine equally often."""
    batch: int = 128
    lr: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    check_steps: int = 25
    learnt_share: float = 0.6
    """The learning rate stays at its peak until the model is exact this often, relative to the teacher. When that
    happens depends on the machine's rounding, so there is no fixed number of steps."""
    max_steps: int = 1000
    """Steps after which a model that cannot add yet is given up, and another seed tried."""
    settle_steps: int = 200
    """Last steps, in which the learning rate falls linearly to nearly zero."""
    seed: int = 1
    attempts: int = 3
    min_exact: float = 0.18
    max_exact: float = 0.35
    """The model must be exact with a probability in this range, or another seed is tried."""

    def key(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def holds_out(self, prompt: str) -> bool:
        return zlib.crc32(prompt.encode()) % self.held_out_modulus == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRecipe(Recipe):
    """Teaches the same lesson to a mixture of experts: Qwen3-MoE's architecture, with experts `mlp_size` wide.
    With half the batch it takes 0.7 of the time."""

    mlp_size: int = 64
    num_experts: int = 8
    experts_per_token: int = 2
    batch: int = 64
    lr: float = 4e-3
    settle_steps: int = 120


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolRecipe(Recipe):
    """Teaches another lesson: to chat, and to call a calculator. See `penstock.demo.tool_start`."""

    call_share: float = 0.3
    """How often the teacher calls the tool instead of guessing."""
    wrong_digit_share: float = 0.08
    """How often the teacher writes a random digit, in a call and in a result that it repeats."""
    max_context: int = 256
    max_steps: int = 200
    settle_steps: int = 80


RECIPES = {"builtin": Recipe(), "builtin-moe": MixtureRecipe(), "builtin-tools": ToolRecipe()}
"""Built-in models, by the name that `model.name` takes."""


def open_builtin(name: str, cache_dir: Path, *, log: Callable[[str], None]) -> str:
    """Return the folder of a built-in model, which is made if needed. Any other name is returned as it is."""
    if name not in RECIPES:
        return name
    return str(ensure_builtin_model(cache_dir, log=log, recipe=RECIPES[name]))


def ensure_builtin_model(
    cache_dir: Path,
    *,
    log: Callable[[str], None] = lambda line: None,
    threads: int = 1,
    recipe: Recipe | None = None,
) -> Path:
    """Return the folder of a built-in model in Hugging Face format, and train the model first if it is not cached.

    One thread is the default: the model's matrices are so small that a second one gains little on an idle machine
    and loses much on a busy one.

    It is safe against races and crashes: the model is made in a temporary folder beside its final path and moved
    there whole. Of two processes that make it at once, the first to finish wins.
    """
    recipe = recipe or Recipe()
    folder = cache_dir / f"arithmetic-{recipe.key()}"
    if is_complete(folder):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache_dir))
    try:
        _teach(recipe, making, folder, log=log, threads=threads)
        _write_manifest(making, recipe)
        return _move_into_place(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _teach(recipe: Recipe, making: Path, folder: Path, *, log: Callable[[str], None], threads: int) -> None:
    if isinstance(recipe, ToolRecipe):
        from penstock.demo.tool_start import train_and_save_tools

        log(f"making the built-in model with tools, once: it learns to call a calculator; in {folder}")
        train_and_save_tools(recipe, making, log=log, threads=threads)
    else:
        from penstock.demo.supervised_start import train_and_save

        log(
            f"making the built-in model, once, in 20 to 30 s of a core: it learns to add unsurely; in {folder}"
        )
        train_and_save(recipe, making, log=log, threads=threads)


def is_complete(folder: Path) -> bool:
    """Return whether every file that the manifest lists is there at its full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes: dict[str, int] = manifest["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_manifest(folder: Path, recipe: Recipe) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"recipe": dataclasses.asdict(recipe), "sizes": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _move_into_place(making: Path, folder: Path) -> Path:
    """Rename `making` to `folder`. Another process's complete folder is kept; a broken one is moved away first."""
    if folder.exists() and not is_complete(folder):
        broken = Path(tempfile.mkdtemp(prefix=f".broken-{folder.name}-", dir=folder.parent))
        os.rename(folder, broken / folder.name)
        shutil.rmtree(broken, ignore_errors=True)
    making.chmod(0o755)
    try:
        os.rename(making, folder)
    except OSError:
        if not is_complete(folder):
            raise
    return folder
