"""Runs `penstock export`: a run's model as an ordinary Hugging Face folder; an adapter as peft reads it, or
merged."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from penstock.checksums import CHECKSUMS, check_files
from penstock.cli.samples import find_run
from penstock.config.loader import read_yaml
from penstock.demo.model import RECIPES
from penstock.durability.kept_checkpoints import best_of, checkpoints_of, rewards_of
from penstock.durability.run_facts import read_facts
from penstock.errors import UserError
from penstock.http_server.hub_access import check_hub
from penstock.models.adapter_folder import CONFIG, TENSORS, is_adapter, model_below
from penstock.observe.plain_text import plain_line
from penstock.safe_files import whole_folder
from penstock.trainer.trainer_start import MODEL

Step = int | Literal["best"]


def read_step(text: str) -> Step:
    """Read a step's number, or `best`."""
    if text == "best":
        return "best"
    if not text.isdigit():
        raise UserError(f"--step must be the step of a checkpoint, or best, got {text!r}")
    return int(text)


def export_model(run: Path, *, step: Step | None, to: Path | None, merge: bool = False) -> Path:
    """Copy a model out of a run, and return its new folder. `merge` merges an adapter into its base model."""
    source = model_of(run, step)
    if merge and not is_adapter(source):
        raise UserError(f"{run} has trained a whole model, so there is nothing to merge; leave --merge out")
    target = to or Path(run.resolve().name if step is None else f"{run.resolve().name}-step-{step}")
    if target.exists():
        raise UserError(f"{target} exists already; name another folder with --to")
    with whole_folder(target) as unnamed:
        if merge:
            _write_merged(source, unnamed, trust_remote_code=_trusts(run))
        left_out = (CHECKSUMS, *((CONFIG, TENSORS) if merge else ()))
        shutil.copytree(
            source, unnamed, dirs_exist_ok=True, ignore=lambda _, names: set(left_out) & set(names)
        )
        unnamed.chmod(0o755)  # a run folder is private, but an exported model is for others
    return target


def find_model(name: str, say: Callable[[str], None]) -> tuple[str, Path | None]:
    """Return the model that a name stands for, and its run if it is a run's. A built-in model and a folder with
    a model come before a run, and a run before a name on the hub."""
    is_model = is_adapter(Path(name)) or (Path(name) / "config.json").is_file()
    run = None if name in RECIPES or is_model else find_run(name)
    if run is None:
        if not (name in RECIPES or Path(name).exists()):
            say(f"{name} is no run and no folder here, so it is looked up on the Hugging Face hub")
        return name, None
    read_facts(run)  # refuses a run of another format
    model = model_of(run)
    say(f"{name} is a run: its model {model}")
    return str(model), run


def model_of(run: Path, step: Step | None = None) -> Path:
    """Return the model of a step, or of the checkpoint with the highest held-out reward. Without a step, return
    the newest: the final one, unless a resumed run has gone past it."""
    found = checkpoints_of(run)
    if step == "best":
        step = best_of(rewards_of(run))
        if step is None:
            raise UserError(
                f"{run} has no checkpoint that was evaluated; set run.checkpoint_every, and eval.every to a "
                "multiple of it"
            )
    if step is not None:
        if step not in found:
            known = ", ".join(map(str, found)) or "none"
            raise UserError(f"{run} has no checkpoint of step {step}; it has checkpoints of steps: {known}")
        return _whole(found[step] / MODEL)
    models = [path / MODEL for path in found.values()][-1:]
    if _config_of(run / MODEL).is_file():
        models.append(run / MODEL)
    if not models:
        raise UserError(
            f"{run} has no model yet; it is saved when the run ends, or with run.checkpoint_every in between"
        )
    return _whole(max(models, key=_age))


def _whole(model: Path) -> Path:
    """Return the model after checking its files against their checksums, where there are any."""
    if (model / CHECKSUMS).is_file():
        check_files(model)
    elif (model.parent / CHECKSUMS).is_file():
        check_files(model.parent, below=f"{MODEL}/")
    return model


def _write_merged(adapter: Path, folder: Path, *, trust_remote_code: bool) -> None:
    """Merge an adapter into its base model, and write the result in the base model's number format."""
    from penstock.models.adapter_merge import merge_adapter
    from penstock.models.load import load_model
    from penstock.models.saving import save_model
    from penstock.models.support import load_config
    from penstock.worker.quiet import quieten

    quieten()
    base, _ = model_below(str(adapter))
    check_hub(base, to_stderr)
    stored = load_config(base, trust_remote_code=trust_remote_code).dtype
    dtype = "float32" if stored is None else str(stored).removeprefix("torch.")
    model = load_model(base, dtype=dtype, trust_remote_code=trust_remote_code)
    merge_adapter(model, adapter)
    save_model(model, folder, None)


def _trusts(run: Path) -> bool:
    section = read_yaml(run / "config.yaml").get("model") or {}
    return bool(section.get("trust_remote_code"))


def _config_of(model: Path) -> Path:
    return model / (CONFIG if is_adapter(model) else "config.json")


def to_stderr(line: str) -> None:
    print(plain_line(line), file=sys.stderr)


def _age(model: Path) -> tuple[int, bool]:
    """Return a sort key: the time of writing; of equally old models, the final one is newer."""
    return _config_of(model).stat().st_mtime_ns, not model.parent.name.startswith("step-")
