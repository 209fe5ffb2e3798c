"""Weights & Biases."""

from pathlib import Path

from penstock.errors import UserError


class WandbWriter:
    name = "wandb"

    def __init__(self, project: str, name: str, folder: Path) -> None:
        import wandb

        try:
            self._run = wandb.init(project=project, name=name, dir=str(folder))
        except wandb.Error as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(
                f"observe.wandb could not start: {reason}; or set WANDB_MODE=offline, which writes into the run "
                "folder alone"
            ) from error
        # wandb's own step only rises, and it ignores what comes later for an earlier one, as evaluations do: they
        # run beside training. A metric of ours may have any order.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
