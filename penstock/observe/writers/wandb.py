"""Logs to Weights & Biases."""

import secrets
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import UserError
from penstock.observe.writers.sample_rows import COLUMNS, KEPT_ROWS, Row, with_overview


class WandbWriter:
    name = "wandb"

    def __init__(self, project: str, name: str, folder: Path, known: str | None = None) -> None:
        """Open the run at wandb; `known` is the id of a resumed run. Offline, each session has a folder of its
        own and the same id."""
        import wandb

        self._wandb = wandb
        self._rows: deque[Row] = deque(maxlen=KEPT_ROWS)
        self.run_id = known or secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=project, name=name, dir=str(folder), id=self.run_id, resume="allow" if known else None
            )
        except wandb.Error as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(
                f"observe.wandb could not start: {reason}; or set WANDB_MODE=offline, which writes into the run "
                "folder alone"
            ) from error
        # wandb's own step only rises, and wandb ignores values that arrive late for an earlier step, as those of
        # evaluations do, which run beside training. A metric of our own may arrive in any order.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **with_overview(metrics)})

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Log the newest rows of the whole run: wandb shows only the last table of a name."""
        self._rows.extend(rows)
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in self._rows])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()
