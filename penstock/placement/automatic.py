"""Chooses what `auto` means for a run, from where trainer and engines compute and how large the model is.

    config, GPUs ─► resolve_auto ─► memory plan ─► config.yaml, workers

Nothing after this sees `auto` in these settings. A setting with a value of its own is left as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.root import PenstockConfig
from penstock.config.unresolved import AUTO
from penstock.errors import UserError
from penstock.models.compilation import COMPILED_FROM, is_worth_compiling
from penstock.placement.gpus import Gpu
from penstock.sync.transports import choose_transport, transport_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Describes where the trainer or the engines compute."""

    device: str
    """`cpu` or `cuda:N`."""
    gpu: Gpu | None = None
    """None on a CPU, and for a GPU that `nvidia-smi` does not list."""

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def name(self) -> str:
        return self.gpu.name if self.gpu is not None else self.device

    @property
    def has_bfloat16(self) -> bool:
        return self.is_gpu and (self.gpu is None or self.gpu.has_bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """Describes where trainer and engines compute. All engines are on one device."""

    trainer: Site
    engine: Site
    are_apart: bool = False
    """Whether they may be on several machines."""

    @property
    def kinds_on_gpu(self) -> tuple[str, ...]:
        """Return the kinds of workers that compute on a GPU."""
        sides = {"trainer": self.trainer, "engine": self.engine}
        return tuple(kind for kind, site in sides.items() if site.is_gpu)

    @property
    def share_a_gpu(self) -> bool:
        return self.trainer.is_gpu and self.trainer.device == self.engine.device

    def __str__(self) -> str:
        if self.trainer.device == self.engine.device:
            return f"on {self.trainer.name}"
        return f"trainer on {self.trainer.name}, engine on {self.engine.name}"


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds a setting, the value chosen for it, and the reason where it is not obvious."""

    setting: str
    value: str
    why: str = ""
    is_logged: bool = True
    """Whether the choice is logged. Every choice is made again when the run resumes."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Holds a config without `auto`, and what was chosen for it."""

    config: PenstockConfig
    sites: Sites
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        return f"auto, {self.sites}: {_words(self.choices)}"

    @property
    def is_logged(self) -> bool:
        """Return whether anything was chosen that the user should see."""
        return any(choice.is_logged for choice in self.choices)

    @property
    def engine_choices(self) -> str:
        """Describe the choices for engines alone; "" where nothing was chosen for them."""
        own = [choice for choice in self.choices if choice.setting.startswith("engine.")]
        return f"auto, on {self.sites.engine.name}: {_words(own)}" if own else ""


def sites_of(config: PenstockConfig, gpus: Sequence[Gpu]) -> Sites:
    placement = config.placement
    trainer = _site(f"cuda:{placement.trainer[0]}" if placement.trainer else config.model.device, gpus)
    wanted = f"cuda:{placement.engines[0]}" if placement.engines else config.engine.device
    return Sites(
        trainer=trainer,
        engine=trainer if wanted == AUTO else _site(wanted, gpus),
        are_apart=config.launcher.reaches_other_machines,
    )


def resolve_auto(
    config: PenstockConfig,
    gpus: Sequence[Gpu] = (),
    *,
    num_parameters: int = 0,
    num_experts: int = 0,
    trains: bool = True,
    has_room: Callable[[PenstockConfig], bool] | None = None,
) -> Resolved:
    """Replace every `auto` by a value.

    `gpus` are those of the machine; `num_parameters` matters only where a side is on one of them. The expert
    choices of a model with `num_experts` are recorded only where it `trains`. `has_room` returns whether the
    ranks of a config have room for what it asks.
    """
    sites = sites_of(config, gpus)
    choices = tuple(
        choice
        for choice in _choose(config, sites, num_parameters, num_experts if trains else 0)
        if _value(config, choice.setting.split(".")) == AUTO
    )
    for choice in choices:
        config = _with(config, choice.setting.split("."), choice.value)
    if config.trainer.gather == AUTO:
        config, how = _resolve_gather(config, has_room)
        choices += (how,)
    if not trains or config.engine.record_routing == AUTO:
        config = _with(config, ("engine", "record_routing"), "off")  # not logged: most models have no experts
    config.check_wire_dtype()
    return Resolved(config, sites, choices)


def check_transport(config: PenstockConfig, sites: Sites) -> None:
    """Refuse a transport that is named and can't work between these devices. Devices of other machines are not
    known here."""
    name = config.sync.transport
    transport = transport_of(name)
    if transport.on_one_gpu and not (sites.share_a_gpu or sites.are_apart):
        raise UserError(
            f"sync.transport={name} needs {transport.needs}, got trainer on {sites.trainer.device} and engines on "
            f"{sites.engine.device}; use shared_memory, or leave it out"
        )


def _choose(config: PenstockConfig, sites: Sites, num_parameters: int, num_experts: int) -> Iterator[Choice]:
    yield _dtype("engine.dtype", sites.engine)
    yield _dtype("trainer.dtype", sites.trainer, bfloat16="float32 master weights")
    yield _compile("engine.embedded.compile", sites.engine, num_parameters)
    if config.trainer.parallel.tensor > 1:
        yield Choice("trainer.compile", "off", "trainer.parallel.tensor")
    else:
        yield _compile("trainer.compile", sites.trainer, num_parameters)
    sync = config.sync
    name, why = choose_transport(
        share_a_gpu=sites.share_a_gpu, are_apart=sites.are_apart, folder=sync.folder, interface=sync.interface
    )
    yield Choice("sync.transport", name, why)
    if num_experts:
        yield Choice("engine.record_routing", "on", f"{num_experts} experts")


def _resolve_gather(
    config: PenstockConfig, has_room: Callable[[PenstockConfig], bool] | None
) -> tuple[PenstockConfig, Choice]:
    """Choose `trainer.gather` last, since the room for it depends on the other choices."""
    setting, parallel = ("trainer", "gather"), config.trainer.parallel
    once = _with(config, setting, "step")
    if parallel.shard * parallel.context > 1 and has_room is not None and has_room(once):
        return once, Choice("trainer.gather", "step", "each GPU has room for all weights")
    return _with(config, setting, "layer"), Choice("trainer.gather", "layer", is_logged=False)


def _dtype(setting: str, site: Site, bfloat16: str = "") -> Choice:
    if site.has_bfloat16:
        return Choice(setting, "bfloat16", bfloat16)
    return Choice(setting, "float32", "this GPU has no bfloat16" if site.is_gpu else "")


def _compile(setting: str, site: Site, num_parameters: int) -> Choice:
    if not site.is_gpu:
        return Choice(setting, "off")
    millions = num_parameters / 1e6
    size = f"{millions:.1f}M parameters, on from {COMPILED_FROM // 10**6}M"
    return Choice(setting, "on" if is_worth_compiling(site.device, num_parameters) else "off", size)


def _site(device: str, gpus: Sequence[Gpu]) -> Site:
    if device == AUTO:
        device = "cuda" if gpus else "cpu"
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return Site(device="cpu")
    index = int(number) if number.isdigit() else 0
    return Site(device=f"cuda:{index}", gpu=gpus[index] if index < len(gpus) else None)


def _words(choices: Sequence[Choice]) -> str:
    """Format the choices as `setting=value (why)`; a reason that several share follows the last of them."""
    words, logged = [], [choice for choice in choices if choice.is_logged]
    for choice, after in zip(logged, (*logged[1:], None), strict=True):
        why = "" if after is not None and after.why == choice.why else choice.why
        words.append(f"{choice.setting}={choice.value}" + (f" ({why})" if why else ""))
    return ", ".join(words)


def _value(section: Any, path: Sequence[str]) -> Any:
    for name in path:
        section = getattr(section, name)
    return section


def _with(section: Any, path: Sequence[str], value: str) -> Any:
    """Copy a section with the setting at this path set to this value."""
    name, *rest = path
    inner = _with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})
