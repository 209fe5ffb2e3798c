"""The `engine.sglang` section: where SGLang's servers are."""

from pydantic import Field

from penstock.config import Section


class SglangConfig(Section):
    """SGLang's servers. Written from its documentation, and not tested on a real server."""

    urls: tuple[str, ...] = ()
    """Servers that run already (`http://host:30000`), one engine each."""
    weights_folder: str = ""
    """Where new weights are written for servers to load; they must see the same path. Empty: a temporary folder."""
    max_context: int = Field(default=0, ge=0)
    """The servers' `--context-length`; 0 takes the model's own limit."""
