"""`penstock export`: a model of a run as an ordinary Hugging Face folder, from its end or from a checkpoint."""

import shutil
from pathlib import Path

from penstock.errors import UserError
from penstock.orchestration.checkpoints import checkpoints_of
from penstock.safe_files import whole_folder
from penstock.trainer.trainer_client import MODEL


def export_model(run: Path, *, step: int | None, to: Path | None) -> Path:
    """Copy a model out of a run; returns the folder where it is now."""
    source = model_of(run, step)
    target = to or Path(run.resolve().name if step is None else f"{run.resolve().name}-step-{step}")
    if target.exists():
        raise UserError(f"{target} exists already; name another folder with --to")
    with whole_folder(target) as unnamed:
        shutil.copytree(source, unnamed, dirs_exist_ok=True)
        unnamed.chmod(0o755)  # a run folder is private, and this one is to be passed on
    return target


def model_of(run: Path, step: int | None = None) -> Path:
    """The model of a step; without a step the newest: the one of the end, unless a resumed run has gone past it."""
    found = checkpoints_of(run)
    if step is not None:
        if step not in found:
            known = ", ".join(map(str, found)) or "none"
            raise UserError(f"{run} has no checkpoint of step {step}; it has checkpoints of steps: {known}")
        return found[step] / MODEL
    models = [path / MODEL for path in found.values()][-1:]
    if (run / MODEL / "config.json").is_file():
        models.append(run / MODEL)
    if not models:
        raise UserError(
            f"{run} has no model yet; it is saved when the run ends, or with run.checkpoint_every in between"
        )
    return max(models, key=_age)


def _age(model: Path) -> tuple[int, bool]:
    """When it was written; of two that are equally old, the one of the end of the run is newer."""
    return (model / "config.json").stat().st_mtime_ns, not model.parent.name.startswith("step-")
