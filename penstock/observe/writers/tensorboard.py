"""Writes TensorBoard events, through torch's own writer."""

from collections.abc import Sequence
from pathlib import Path

from penstock.observe.writers.sample_rows import Row, as_text, with_overview


class TensorBoardWriter:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in with_overview(metrics).items():
            self._writer.add_scalar(name, value, step)

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        self._writer.add_text("samples", as_text(rows), step)

    def close(self) -> None:
        self._writer.close()
