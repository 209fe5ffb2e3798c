"""Defines the `observe` section: what a person sees of a run, and where its metrics go."""

from typing import Literal

from pydantic import Field

from penstock.config import Section


class ObserveConfig(Section):
    """Configures what a run shows on screen and on its page, and where metrics go besides `metrics.jsonl`."""

    view: Literal["auto", "live", "plain", "none"] = "auto"
    """`live` draws in the terminal or in a notebook's cell, `plain` prints log lines, `none` shows nothing. `auto`
    is `live` in a terminal or notebook, and `plain` elsewhere."""
    every_s: float = Field(default=5.0, gt=0)
    """Seconds between progress lines of the plain view."""
    samples_mb: float = Field(default=64.0, ge=0, le=1e6)
    """Megabytes of answers that the run folder keeps: the newest half in full, and an even share of all older ones;
    0 keeps none. That a group was dropped, and why, is always kept."""
    traced_answers: int = Field(default=8, ge=0, le=1024)
    """Answers of each step that are kept token by token, with the engine's and the trainer's logprobs, besides the
    answer whose logprobs differ most. 0 keeps none."""
    tokens_mb: float = Field(default=64.0, ge=0, le=1e6)
    """Megabytes of such tokens that the run folder keeps, thinned as `samples_mb` says; 0 keeps none."""
    spans_mb: float = Field(default=128.0, ge=0, le=1e6)
    """Megabytes of spans and counters that the run folder keeps; the oldest are deleted first. 0 keeps none."""
    gpu_hour_price: float | None = Field(default=None, ge=0)
    """Price of one GPU-hour, in any currency. If it is set, the report and the page show what the run cost."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (needs `penstock[tensorboard]`)."""
    wandb: bool = False
    """Log to Weights & Biases (needs `penstock[wandb]`)."""
    trackio: bool = False
    """Log to trackio (needs `penstock[trackio]`)."""
    project: str = "penstock"
    """Project name for wandb and trackio."""
    dashboard: bool = True
    """Serve a web page of the run while it is running. Its address is printed at the start; its process starts when
    the page is first opened."""
    dashboard_host: str = "127.0.0.1"
    """Address that the page listens on. Opening it needs the token in the printed address, on loopback too."""
    dashboard_port: int = Field(default=8421, ge=0, le=65535)
    """Port of the page; a free one if this one is taken."""
    dashboard_hosts: tuple[str, ...] = ()
    """Other host names under which browsers may reach the page, such as a notebook proxy's. Loopback names are
    always accepted, so a tunnel (`ssh -L`) needs none."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """Seconds without progress after which the log says who waits for whom, and why."""
