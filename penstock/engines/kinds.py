"""Which engines there are: `engine.kind` names a record that says how one is opened, and what it can do.

A kind is an `EngineKind` in a file of its own: one of `KINDS`, or a user's by path (`file.py:NAME`, `module:NAME`).
The record imports nothing heavy, so the controller knows what every kind can do before a process starts. The opener
is imported in the engine's process.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import Section
from penstock.config.loader import build_section
from penstock.errors import ConfigError, UserError
from penstock.models.config import LoraConfig
from penstock.records.interfaces import BlobStore, Engine, WeightReceiver
from penstock.usercode import is_function_path, load_object

if TYPE_CHECKING:
    from penstock.engines.config import EngineConfig


SAMPLING = (
    "logprobs",
    "versions",
    "greedy",
    "seed",
    "truncation",
    "penalties",
    "logit_bias",
    "min_tokens",
    "priority",
)
"""Capabilities of every engine that samples by all of `SamplingParams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is opened with."""

    name: str
    model: str
    """Folder or name of the model."""
    device: str
    """What `engine.device: auto` means."""
    config: "EngineConfig"
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

    @property
    def settings(self) -> Any:
        """The section of the engine's own kind."""
        return settings_of(self.config)


class ServedEngine(Engine, Protocol):
    """An engine that works while `run` does."""

    name: str

    async def run(self) -> None:
        """Serve until `close`. What breaks the engine leaves from here."""


Opener = Callable[[EngineParts], Awaitable[ServedEngine]]


class NoSettings(Section):
    """A kind that has nothing to set."""


def _one_gpu(settings: Any) -> int:
    return 1


def _no_change(settings: Any, lora: LoraConfig, on_head: bool) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What a run knows of a kind of engine before one is started."""

    opener: str | Opener
    """A coroutine function of `EngineParts`, or its `module:function` where importing it takes long."""
    can: Callable[["EngineConfig", LoraConfig | None], Collection[str]]
    """The capabilities that engines of this section report, with the adapter that is trained if one is."""
    settings: type[Section] = NoSettings
    """The settings of this kind alone. In a field `urls` they name servers, each of which is one engine; a field
    `memory_share` is set to an engine's share of the GPU's memory."""
    num_gpus: Callable[[Any], int] = _one_gpu
    """How many GPUs an engine with these settings takes; 0 where it runs elsewhere."""
    computes_here: bool = False
    """Whether it computes in the process that opens it, whose torch must know `engine.device`. Servers may have a
    torch of their own, or be elsewhere."""
    repeats_with: Mapping[str, Any] | None = None
    """The settings with which it samples the same answers in every run (`run.deterministic`); None where there are
    none."""
    for_adapter: Callable[[Any, LoraConfig, bool], Mapping[str, Any]] = _no_change
    """Which of its settings change to serve an adapter that is trained. The flag says whether the adapter changes
    the output embedding. Raises `UserError` where the settings rule the adapter out."""
    lowered: str = ""
    """The setting for how many sequences an engine computes at a time: it is halved after a process ran out of
    memory. "" where there is none."""


DEFAULT_KIND = "embedded"
KINDS: Mapping[str, str] = {
    "embedded": "penstock.engines.embedded.embedded_kind:EMBEDDED",
    "vllm": "penstock.engines.vllm.vllm_kind:VLLM",
}
"""Where the record of each of our kinds is."""


def kind_of(name: str) -> EngineKind:
    """The record of one of our kinds, or of a user's by path."""
    check_kind(name)
    if name in KINDS:
        module, _, record = KINDS[name].partition(":")
        kind = getattr(import_module(module), record)
    else:
        kind = load_object(name, what="engine kind")
    if not isinstance(kind, EngineKind):
        raise UserError(f"the engine kind {name!r} must be a penstock.engines.kinds.EngineKind, got {kind!r}")
    return kind


def check_kind(name: str) -> None:
    """Refuse a name that can't be a kind's. A path is loaded when it is needed."""
    if name not in KINDS and not is_function_path(name):
        raise ConfigError(
            f"engine.kind must be {', '.join(sorted(KINDS))} or the path of a kind of your own (file.py:NAME or "
            f"module:NAME), got {name!r}"
        )


def settings_of(section: "EngineConfig") -> Section:
    """The section of its kind: `engine.NAME`, or for a kind by path its entry in `engine.settings`, checked."""
    if section.kind in KINDS:
        own: Section = getattr(section, section.kind)
        return own
    settings = section.settings.get(section.kind, {})
    return build_section(kind_of(section.kind).settings, settings, f"engine.settings of {section.kind}")


def path_of_settings(section: "EngineConfig") -> str:
    """The key of a config under which the settings of its kind are."""
    return f"engine.{section.kind}" if section.kind in KINDS else "engine.settings"


async def open_engine(parts: EngineParts) -> ServedEngine:
    """An engine of `parts.config.kind` that is ready to run."""
    opener = kind_of(parts.config.kind).opener
    if isinstance(opener, str):
        module, _, function = opener.partition(":")
        opener = getattr(import_module(module), function)
    assert callable(opener)
    engine: ServedEngine = await opener(parts)
    return engine
