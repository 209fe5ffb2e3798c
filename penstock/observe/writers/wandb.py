"""Weights & Biases."""

from pathlib import Path

from penstock.errors import MissingExtraError


class WandbWriter:
    def __init__(self, project: str, name: str, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("observe.wandb needs wandb: pip install 'penstock[wandb]'") from error
        self._run = wandb.init(project=project, name=name, dir=str(folder))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
