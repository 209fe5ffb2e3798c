"""The `observe` section: what a person sees of a run, and where numbers go."""

from typing import Literal

from pydantic import Field

from penstock.config import Section


class ObserveConfig(Section):
    """What a person sees of a run, and where its numbers go besides `metrics.jsonl`."""

    view: Literal["auto", "live", "plain", "none"] = "auto"
    """`live` draws in the terminal or in a notebook's cell, `plain` prints log lines, `auto` takes `live` only
    there."""
    every_s: float = Field(default=5.0, gt=0)
    """Seconds between two progress lines of the plain view."""
    samples_mb: float = Field(default=64.0, ge=0, le=1e6)
    """Megabytes of samples that the run folder keeps, the newest ones (`samples.jsonl`); 0 keeps none."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (needs `penstock[tensorboard]`)."""
    wandb: bool = False
    """Log to Weights & Biases (needs `penstock[wandb]`)."""
    trackio: bool = False
    """Log to trackio (needs `penstock[trackio]`)."""
    project: str = "penstock"
    """Project name for wandb and trackio."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """When nothing has moved for this long, say who waits for whom and why."""
