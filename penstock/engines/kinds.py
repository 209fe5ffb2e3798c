"""Maps `engine.kind` to a record that says how such an engine is opened and what it can do.

A kind is an `EngineKind` in a file of its own: one of `KINDS`, or a user's by path (`file.py:NAME`,
`module:NAME`). The record imports nothing heavy, so the controller knows what every kind can do before a
process starts. The opener is imported in the engine's process.
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
"""Capabilities of every engine that supports all of `SamplingParams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Holds what an engine is built from."""

    name: str
    model: str
    """Folder or name of the model."""
    device: str
    """The device that `engine.device: auto` resolves to."""
    config: "EngineConfig"
    receiver: WeightReceiver
    blobs: BlobStore
    versions: Mapping[str, int]
    """The policies that the engine serves, each with its first version."""
    lora: LoraConfig | None = None
    """The adapter that is trained, if the base weights stay as they are."""
    trust_remote_code: bool = False
    """`model.trust_remote_code`."""
    adapter: str = ""
    """The folder of an adapter that is merged into the model permanently; "" takes the model as it is."""
    threads: int = 1
    """Torch threads of the engine, or of the server that it starts."""
    folder: str = ""
    """A folder that is removed with the run; "" makes one where it is needed."""
    interface: str = ""
    """`sync.interface`, for a server that fetches weights itself."""
    sync_token: str = ""
    """The token that the trainer asks for before it serves weights."""

    @property
    def settings(self) -> Any:
        """Return the section of the engine's own kind."""
        return settings_of(self.config)


class ServedEngine(Engine, Protocol):
    """Serves requests while its `run` is running."""

    name: str

    async def run(self) -> None:
        """Serve until `close`. An error that breaks the engine is raised here."""


Opener = Callable[[EngineParts], Awaitable[ServedEngine]]


class NoSettings(Section):
    """Stands for a kind of engine without settings."""


def _one_gpu(settings: Any) -> int:
    return 1


def _no_change(settings: Any, lora: LoraConfig, on_head: bool) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Describes a kind of engine to a run, before any such engine starts."""

    opener: str | Opener
    """A coroutine function of `EngineParts`, or its `module:function` where importing it takes long."""
    can: Callable[["EngineConfig", LoraConfig | None], Collection[str]]
    """Returns the capabilities that engines of this section report; it also gets the adapter that is trained, if
    any."""
    settings: type[Section] = NoSettings
    """The settings section of this kind. A field `urls` names servers, each of which is one engine. A field
    `memory_share` is set to an engine's share of the GPU's memory."""
    num_gpus: Callable[[Any], int] = _one_gpu
    """How many GPUs an engine with these settings takes; 0 if it runs elsewhere."""
    computes_here: bool = False
    """Whether the engine computes in the process that opens it, whose torch must then support `engine.device`.
    Servers may have their own torch, or run elsewhere."""
    repeats_with: Mapping[str, Any] | None = None
    """The settings with which it samples the same answers in every run (`run.deterministic`); None where there are
    none."""
    for_adapter: Callable[[Any, LoraConfig, bool], Mapping[str, Any]] = _no_change
    """Which of its settings change to serve an adapter that is trained. The flag says whether the adapter changes
    the output embedding. Raises `UserError` where the settings rule the adapter out."""
    lowered: str = ""
    """The setting that limits how many sequences an engine computes at a time. It is halved after a process ran
    out of memory. "" if there is none."""


DEFAULT_KIND = "embedded"
KINDS: Mapping[str, str] = {
    "embedded": "penstock.engines.embedded.embedded_kind:EMBEDDED",
    "vllm": "penstock.engines.vllm.vllm_kind:VLLM",
}
"""Where the record of each built-in kind is."""


def kind_of(name: str) -> EngineKind:
    """Return the record of a built-in kind, or of a user's kind by path."""
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
    """Raise `ConfigError` unless the name is a built-in kind or a path. A path is loaded when it is needed."""
    if name not in KINDS and not is_function_path(name):
        raise ConfigError(
            f"engine.kind must be {', '.join(sorted(KINDS))} or the path of a kind of your own (file.py:NAME or "
            f"module:NAME), got {name!r}"
        )


def settings_of(section: "EngineConfig") -> Section:
    """Return the settings of the section's kind: `engine.NAME`, or a path's entry in `engine.settings`, checked."""
    if section.kind in KINDS:
        own: Section = getattr(section, section.kind)
        return own
    settings = section.settings.get(section.kind, {})
    return build_section(kind_of(section.kind).settings, settings, f"engine.settings of {section.kind}")


def path_of_settings(section: "EngineConfig") -> str:
    """Return the config key that holds the settings of its kind."""
    return f"engine.{section.kind}" if section.kind in KINDS else "engine.settings"


async def open_engine(parts: EngineParts) -> ServedEngine:
    """Open an engine of `parts.config.kind` that is ready to run."""
    opener = kind_of(parts.config.kind).opener
    if isinstance(opener, str):
        module, _, function = opener.partition(":")
        opener = getattr(import_module(module), function)
    assert callable(opener)
    engine: ServedEngine = await opener(parts)
    return engine
