"""Which engines there are: `engine.kind`, and how a worker opens one of that kind.

A kind is a line in `KINDS` and a file of its own with an opener in it, which is imported when it is asked for. So
the controller knows all kinds and loads none, and what one kind depends on is never needed for another.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from penstock.engines.config import EngineConfig
from penstock.errors import UserError
from penstock.interfaces import BlobStore, Engine, WeightReceiver
from penstock.models.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is opened with."""

    name: str
    model: str
    """Folder or name of the model."""
    device: str
    """What `engine.device: auto` means."""
    config: EngineConfig
    receiver: WeightReceiver
    blobs: BlobStore
    versions: Mapping[str, int]
    """The policies that it serves, each with the version that it begins with."""
    lora: LoraConfig | None = None
    """The adapter that is trained, if the weights will stay as they are."""
    trust_remote_code: bool = False
    """`model.trust_remote_code`."""
    adapter: str = ""
    """The folder of an adapter that is merged into the model for good; "" takes the model as it is."""
    threads: int = 1
    """Torch threads, also of a server that is started."""
    folder: str = ""
    """A folder that goes with the run; "" makes one where it is needed."""
    interface: str = ""
    """`sync.interface`, for a server that fetches weights itself."""
    sync_token: str = ""
    """What the trainer asks for before it serves weights."""


class ServedEngine(Engine, Protocol):
    """An engine that works while `run` does."""

    name: str

    async def run(self) -> None:
        """Serve until `close`. What breaks the engine leaves from here."""


Opener = Callable[[EngineParts], Awaitable[ServedEngine]]
KINDS: Mapping[str, str] = {
    "embedded": "penstock.engines.embedded.opening:open_embedded",
    "vllm": "penstock.engines.vllm.vllm_opening:open_vllm",
    "sglang": "penstock.engines.sglang.sglang_opening:open_sglang",
}
"""`module:function` of each kind's opener."""


async def open_engine(kind: str, parts: EngineParts, kinds: Mapping[str, str] = KINDS) -> ServedEngine:
    """An engine that is ready to run."""
    if kind not in kinds:
        raise UserError(f"engine.kind must be one of {', '.join(sorted(kinds))}, got {kind!r}")
    module, _, function = kinds[kind].partition(":")
    opener: Opener = getattr(import_module(module), function)
    return await opener(parts)
