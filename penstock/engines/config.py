"""Defines the `engine` section: which engines a run has, how many, and the settings that every kind shares."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config import Section
from penstock.engines.embedded.config import EmbeddedConfig, RecordRouting
from penstock.engines.kinds import DEFAULT_KIND, KINDS, check_kind, settings_of
from penstock.engines.vllm.config import VllmConfig

MAX_ENGINES = 10_000


class RangeConfig(Section):
    """Sets how few and how many engines a run may have. Engines join and leave with the work."""

    min: int = Field(default=1, ge=1, le=MAX_ENGINES)
    """Engines that start with the run. Scaling never goes below this number."""
    max: int = Field(default=1, ge=1, le=MAX_ENGINES)
    """Most engines at once. They join while the trainer waits for groups."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "RangeConfig":
        if self.min > self.max:
            raise ValueError(f"max must be at least min, got min={self.min} and max={self.max}")
        return self


class EngineConfig(Section):
    """Configures the inference engines: their kind, their number, and a section of settings for each kind."""

    kind: str = DEFAULT_KIND
    """Which engine generates: `embedded`, `vllm`, or a kind of your own by path (`file.py:NAME`, `module:NAME`).
    Settings that only one kind has are in the section of its name, and those of your own kind in `settings`.
    """
    count: Annotated[int, Field(ge=1, le=MAX_ENGINES)] | RangeConfig = 1
    """Number of engine processes. With `{min: 1, max: 4}` one starts, others join while the trainer waits for
    groups and leave while they are idle. Where `urls` of the kind names servers, there is one engine for each
    of them."""
    beside: dict[str, Annotated[int, Field(ge=1, le=MAX_ENGINES)]] = Field(default_factory=dict)
    """Engines of other kinds in the same pool, and the number of each: `{vllm: 1}`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Torch threads of each engine process; 0 lets the launcher share out the cores."""
    device: str = "auto"
    """Torch device that the engine runs on; `auto` takes `model.device`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights, and of the KV cache unless another one is configured. `auto` is bfloat16 on
    a GPU that computes in it, otherwise float32."""
    max_context: int = Field(default=0, ge=0)
    """Longest sequence, prompt and output together; 0 takes the model's limit."""
    record_routing: RecordRouting = "auto"
    """Record which experts of a mixture-of-experts model computed each token, so that the trainer can replay
    them. `auto` is on for such models in runs that train, and off elsewhere. A model or engine that can't
    record them is refused at the start."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    """Settings of `kind: embedded`."""
    vllm: VllmConfig = VllmConfig()
    """Settings of `kind: vllm`."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of your own kinds, by their path: `{file.py:NAME: {…}}`."""

    @field_validator("kind")
    @classmethod
    def _is_a_kind(cls, name: str) -> str:
        check_kind(name)
        return name

    @model_validator(mode="after")
    def _names_each_kind_once(self) -> "EngineConfig":
        if self.kind in self.beside:
            raise ValueError(
                f"beside must name other kinds than {self.kind}, got {self.beside[self.kind]} of it; raise count"
            )
        for name in self.beside:
            check_kind(name)
        if unused := [name for name in self.settings if name not in self.kinds or name in KINDS]:
            raise ValueError(
                f"settings must be of kinds of your own that are used ({', '.join(self.kinds)}), got some of "
                f"{', '.join(unused)}"
            )
        own = settings_of(self) if self.kind in KINDS else None
        if isinstance(self.count, RangeConfig) and getattr(own, "urls", None):
            raise ValueError(f"count must be a number where {self.kind}.urls name servers, got a range")
        return self

    @property
    def num_first(self) -> int:
        """Return how many engines of `kind` start with the run."""
        return self.count.min if isinstance(self.count, RangeConfig) else self.count

    @property
    def num_most(self) -> int:
        """Return how many engines of `kind` there may be at once."""
        return self.count.max if isinstance(self.count, RangeConfig) else self.count

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return `kind` and all kinds in `beside`."""
        return (self.kind, *self.beside)

    @property
    def members(self) -> tuple["EngineConfig", ...]:
        """Return a section for each engine process that starts with the run. Each is of one kind, and has the
        URL of one server if it joins one."""
        counts = {self.kind: self.num_first, **self.beside}
        return tuple(each for kind, count in counts.items() for each in self._of(kind, count))

    def member(self, index: int) -> "EngineConfig":
        """Return the section of an engine by its number. Engines that join later are of `kind`."""
        members = self.members
        return members[index] if index < len(members) else self._of(self.kind, 1)[0]

    def _of(self, kind: str, count: int) -> tuple["EngineConfig", ...]:
        alone = self.model_copy(update={"kind": kind, "count": 1, "beside": {}})
        urls = getattr(settings_of(alone), "urls", ())
        if not urls:
            return (alone,) * count
        return tuple(with_settings(alone, urls=(url,)) for url in urls)


def with_settings(section: EngineConfig, **values: Any) -> EngineConfig:
    """Return the section with other values for the settings of its own kind."""
    kind, own = section.kind, settings_of(section).model_copy(update=values)
    if kind in EngineConfig.model_fields:
        return section.model_copy(update={kind: own})
    return section.model_copy(update={"settings": {**section.settings, kind: own.model_dump(mode="json")}})
