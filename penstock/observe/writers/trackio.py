"""Logs to trackio, a local tracker with wandb's interface."""

import secrets
from collections.abc import Sequence

from penstock.observe.writers.sample_rows import COLUMNS, Row, with_overview


class TrackioWriter:
    name = "trackio"

    def __init__(self, project: str, name: str, known: str | None = None) -> None:
        """Open the run at trackio; `known` is the name under which trackio has a resumed run."""
        import trackio

        self._trackio = trackio
        # trackio finds a run by its name, which another run of the same project may have too.
        self.run_id = known or f"{name}-{secrets.token_hex(2)}"
        trackio.init(project=project, name=self.run_id, resume="allow" if known else "never")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(with_overview(metrics), step=step)

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        import pandas

        table = self._trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))
        self._trackio.log({"samples": table}, step=step)

    def close(self) -> None:
        self._trackio.finish()
