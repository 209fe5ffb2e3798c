"""The `observe` section: what a person sees of a run, and where its metrics go."""

from typing import Literal

from pydantic import Field

from penstock.config import Section


class ObserveConfig(Section):
    """Configures what a run shows on screen and on its page, and where metrics go besides `metrics.jsonl`."""

    view: Literal["auto", "live", "plain", "none"] = "auto"
    """`live` draws in the terminal or in a notebook's cell, `plain` prints log lines, `auto` takes `live` only
    there."""
    every_s: float = Field(default=5.0, gt=0)
    """Seconds between two progress lines of the plain view."""
    samples_mb: float = Field(default=64.0, ge=0, le=1e6)
    """Megabytes of answers that the run folder keeps: the newest half whole, and an even share of all older ones;
    0 keeps none. Drops are kept in any case."""
    traced_answers: int = Field(default=8, ge=0, le=1024)
    """Answers of each step whose tokens are kept one by one, with both sides' logprobs; the one with the widest gap
    comes in addition. 0 keeps none."""
    tokens_mb: float = Field(default=64.0, ge=0, le=1e6)
    """Megabytes of such tokens that the run folder keeps, the same way; 0 keeps none."""
    spans_mb: float = Field(default=128.0, ge=0, le=1e6)
    """Megabytes of spans and counters that the run folder keeps, the newest ones; 0 keeps none."""
    gpu_hour_price: float | None = Field(default=None, ge=0)
    """What an hour of one GPU costs, in any currency: a run then says what it has cost."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (needs `penstock[tensorboard]`)."""
    wandb: bool = False
    """Log to Weights & Biases (needs `penstock[wandb]`)."""
    trackio: bool = False
    """Log to trackio (needs `penstock[trackio]`)."""
    project: str = "penstock"
    """Project name for wandb and trackio."""
    dashboard: bool = True
    """Serve a web page of the run while it goes on; its address is printed at the start. The page's process starts
    when somebody first opens it."""
    dashboard_host: str = "127.0.0.1"
    """Where the page listens. Whoever opens it needs the token in its address, on loopback too."""
    dashboard_port: int = Field(default=8421, ge=0, le=65535)
    """Its port; a free one when this one is taken."""
    dashboard_hosts: tuple[str, ...] = ()
    """Other host names under which the page may be asked for: those of a notebook's proxy, say. Loopback's names
    are always known, so a tunnel (`ssh -L`) needs none."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """When nothing has moved for this long, say who waits for whom and why."""
