"""Defines the `engine.vllm` section: the settings that only vLLM servers have."""

from pydantic import Field, field_validator

from penstock.config import Section


class VllmConfig(Section):
    """Configures vLLM servers: how they are started, or where they are."""

    command: str = "vllm"
    """The program that starts a server. vLLM may have an environment of its own: name its `bin/vllm`. penstock
    must be installed there too, since vLLM loads new weights through it."""
    urls: tuple[str, ...] = ()
    """Servers that are already running (`http://host:8000`), one engine each, instead of the `engine.count` that
    would be started. docs/engines.md says what they need."""
    max_batch: int = Field(default=64, ge=1)
    """Most sequences in one forward pass."""
    cache_gb: float = Field(default=0.0, ge=0)
    """Size of the KV cache in GB. 0 means 1 GB on a CPU, and on a GPU what `memory_share` leaves."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that one server may take."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that one server splits the model over."""
    arguments: tuple[str, ...] = ()
    """More arguments for `vllm serve`, after ours."""
    adapter_folder: str = ""
    """Folder in which adapters are written for servers to load. A joined server must see it under the same path.
    Empty: a temporary folder."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a server to answer after its start."""
    restarts: int = Field(default=3, ge=0)
    """How often a server that has died is restarted before the run ends."""

    @field_validator("urls", mode="before")
    @classmethod
    def _are_urls(cls, urls: object) -> object:
        given = (urls,) if isinstance(urls, str) else urls
        for url in given if isinstance(given, list | tuple) else ():
            if not str(url).startswith(("http://", "https://", "unix:")):
                raise ValueError(f"urls must begin with http://, https:// or unix:, got {url!r}")
        return given
