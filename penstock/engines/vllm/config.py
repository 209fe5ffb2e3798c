"""The `engine.vllm` section: what only vLLM's servers have."""

from pydantic import Field, field_validator

from penstock.config import Section


class VllmConfig(Section):
    """vLLM's servers: how they are started, or where they are."""

    command: str = "vllm"
    """The program that starts a server. vLLM may have an environment of its own: name its `bin/vllm`. penstock must
    be installed there too, since vLLM loads new weights through it."""
    urls: tuple[str, ...] = ()
    """Servers that run already (`http://host:8000`), one engine each, instead of `engine.count` that are started.
    Behind `vllm serve` they need what docs/engines.md says."""
    max_batch: int = Field(default=64, ge=1)
    """Sequences in one forward pass at most."""
    cache_gb: float = Field(default=0.0, ge=0)
    """Size of the KV cache in GB. 0 is 1 on a CPU, and on a GPU what memory_share leaves."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """On a GPU: share of its memory that one server may take."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that one server spreads a model over."""
    arguments: tuple[str, ...] = ()
    """More arguments for `vllm serve`, after ours."""
    adapter_folder: str = ""
    """Where adapters are written for servers to load; a server that was joined must see the same path. Empty: a
    temporary folder."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a server to answer after its start."""
    restarts: int = Field(default=3, ge=0)
    """How often a server that has died is started again before the run ends."""

    @field_validator("urls", mode="before")
    @classmethod
    def _are_urls(cls, urls: object) -> object:
        given = (urls,) if isinstance(urls, str) else urls
        for url in given if isinstance(given, list | tuple) else ():
            if not str(url).startswith(("http://", "https://", "unix:")):
                raise ValueError(f"urls must begin with http://, https:// or unix:, got {url!r}")
        return given
