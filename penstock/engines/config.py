"""The `engine` section: which engines, how many, and what holds for every kind of them."""

from typing import Literal

from pydantic import Field

from penstock.config import Section
from penstock.engines.embedded.config import EmbeddedConfig, RecordRouting


class EngineConfig(Section):
    """Inference engines: their kind, how many there are, and a section of settings for each kind."""

    kind: Literal["embedded"] = "embedded"
    """Which engine generates. Settings that only one kind has are in the section of its name."""
    count: int = Field(default=1, ge=1)
    """Number of engine processes."""
    threads: int = Field(default=0, ge=0)
    """Torch threads of each engine process; 0 lets the launcher share out the cores."""
    device: str = "auto"
    """Torch device that the engine runs on; `auto` takes `model.device`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights, and of the cache where nothing else is said. `auto`: bfloat16 on a GPU that
    computes in it, else float32."""
    max_context: int = Field(default=0, ge=0)
    """Longest sequence, prompt and output together; 0 takes the model's own limit."""
    record_routing: RecordRouting = "auto"
    """Record which experts of a mixture-of-experts model computed each token, for the trainer to replay. `auto`: on
    where the engine can, which is on a CPU so far."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    """Of `kind: embedded`."""
