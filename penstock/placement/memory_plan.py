"""Shares out the GPU's memory before anything large is loaded.

    free ─ margin ─► trainer ─► published weights ─► engines: weights, staged update, workspace; the rest is cache

The trainer's part is an estimate (`penstock.trainer.memory_estimate`); the engines get what it leaves. When
this can't fit, a `UserError` gives the numbers and the settings that change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.root import PenstockConfig
from penstock.engines.embedded.config import SPARE_SLOTS, EmbeddedConfig
from penstock.engines.kinds import kind_of, path_of_settings, settings_of
from penstock.errors import UserError
from penstock.placement.automatic import resolve_auto, sites_of
from penstock.placement.gpu_pools import Needs, gb, num_ranks, num_shards
from penstock.placement.gpus import Gpu
from penstock.sync.transports import transport_of

if TYPE_CHECKING:
    from penstock.models.outline import Outline
    from penstock.trainer.memory_estimate import MemoryEstimate

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT_BYTES = int(0.6e9)
"""What the CUDA context takes in each process."""
MARGIN = 0.03
"""The share of the GPU that allocators leave unused between their blocks."""
ENGINE_ALONE = 0.9
SMALLER_STATES = {"float32": ("8bit", "cpu"), "8bit": ("cpu",), "cpu": ()}
"""Settings of `trainer.optimizer_states` that take less of the GPU."""


@dataclass(frozen=True, slots=True)
class _EngineSettings:
    """Holds what an engine's own settings say of its memory. Where a kind lacks one of them, the embedded engine's
    default counts."""

    path: str
    max_batch: int
    kv_tokens: int
    kv_dtype: str
    cache_gb: float
    memory_share: float
    """0 where the config has the kind's default."""
    adapters: str
    max_adapters: int

    @staticmethod
    def of(config: PenstockConfig) -> "_EngineSettings":
        own, default = settings_of(config.engine), EmbeddedConfig()
        values = {
            name: getattr(own, name, getattr(default, name))
            for name in ("max_batch", "kv_tokens", "kv_dtype", "cache_gb", "adapters", "max_adapters")
        }
        field = type(own).model_fields.get("memory_share")
        share = getattr(own, "memory_share", 0.0)
        is_set = field is not None and share != field.default
        return _EngineSettings(
            path=path_of_settings(config.engine), memory_share=share if is_set else 0.0, **values
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Says how many bytes of the engines' GPU each process gets."""

    gpu: Gpu
    trainer: int
    published: int
    engine: int
    """All that each engine may take."""
    cache: int
    """What is left of `engine` for the cache."""
    staged: int
    """What each engine must keep free for a staged update."""
    num_engines: int
    kv_bytes_per_token: int
    rank: int = 0
    """What each rank of the trainer takes of a GPU of its own; 0 where it is on the engines' GPU."""
    num_ranks: int = 1

    @property
    def memory_share(self) -> float:
        """Return the share of the GPU within which an engine sizes its cache."""
        return (self.engine - self.staged) / self.gpu.total_bytes

    def __str__(self) -> str:
        parts = [f"trainer about {gb(self.trainer)}"] if self.trainer else []
        if self.rank:
            ranks = "trainer" if self.num_ranks == 1 else f"each of {self.num_ranks} ranks of the trainer"
            own = "a GPU of its own" if self.num_ranks == 1 else "GPUs of their own"
            parts = [f"{ranks} about {gb(self.rank)}, on {own}"]
        parts += [f"published weights {gb(self.published)}"] if self.published else []
        engines = "engine" if self.num_engines == 1 else f"each of {self.num_engines} engines"
        tokens = self.cache // self.kv_bytes_per_token
        parts.append(
            f"{engines} at most {gb(self.engine)}, with a cache of up to {gb(self.cache)} ({tokens:,} tokens)"
        )
        return f"memory of {self.gpu.name} ({gb(self.gpu.total_bytes)}): {'; '.join(parts)}"


def plan_memory(
    config: PenstockConfig, outline: "Outline", gpus: Sequence[Gpu], *, longest: int
) -> MemoryPlan | None:
    """Share out the GPUs' memory; `UserError` if it does not suffice. `longest` is the longest sequence expected.

    None where the engines run on no GPU that is known.
    """
    sites = sites_of(config, gpus)
    needed, published = 0, 0
    if sites.trainer.gpu is not None:
        needed, published = _of_rank(config, outline, longest)
        _check_trainer(config, outline, sites.trainer.gpu, needed, published, longest)
    if sites.engine.gpu is None:
        return None
    if sites.share_a_gpu:
        return _share_out(config, outline, sites.engine.gpu, needed, published, longest)
    alone = _share_out(config, outline, sites.engine.gpu, 0, 0, longest)
    return replace(alone, rank=needed + published, num_ranks=num_ranks(config))


def rank_bytes(config: PenstockConfig, outline: "Outline", *, longest: int, shards: int) -> int:
    """Estimate what a rank takes of its GPU: its part of the persistent state, and all of what a step needs
    besides.

    Split weights are gathered for the layer that computes and the next one, or all at once (`trainer.gather`).
    """
    estimate = estimate_trainer(config, outline, longest=longest)
    if shards == 1:
        return CONTEXT_BYTES + estimate.total
    at_once = outline.num_layers if config.trainer.gather == "step" else 2
    layers = min(at_once, outline.num_layers) * estimate.weights // max(1, outline.num_layers)
    step = estimate.activations + max(estimate.head, estimate.layer, estimate.update)
    return CONTEXT_BYTES + estimate.resident // shards + layers + step


def ranks_have_room(config: PenstockConfig, outline: "Outline", gpus: Sequence[Gpu], *, longest: int) -> bool:
    """Return whether ranks on GPUs of their own have room for what the config asks."""
    sites = sites_of(config, gpus)
    if sites.trainer.gpu is None or sites.share_a_gpu:
        return False
    return sum(_of_rank(config, outline, longest)) <= _room(sites.trainer.gpu)


def _of_rank(config: PenstockConfig, outline: "Outline", longest: int) -> tuple[int, int]:
    """Return what a rank takes, and its part of the published weights."""
    shards = num_shards(config)
    return rank_bytes(config, outline, longest=longest, shards=shards), published_bytes(
        config, outline
    ) // shards


def needs_of(config: PenstockConfig, outline: "Outline", gpus: Sequence[Gpu], *, longest: int) -> Needs:
    """Return what the model needs of GPUs, for `resolve_pools`. The values of `auto` that matter here depend on
    no pool."""
    chosen = resolve_auto(config, gpus, num_parameters=outline.num_parameters).config
    return Needs(
        num_parameters=outline.num_parameters,
        rank=lambda shards: rank_bytes(chosen, outline, longest=longest, shards=shards),
        room=_room,
    )


def estimate_trainer(
    config: PenstockConfig, outline: "Outline", *, longest: int, states: str | None = None
) -> "MemoryEstimate":
    """Estimate what the trainer takes besides `CONTEXT_BYTES`, as configured or with other optimizer `states`.

    Persistent state is counted whole; of a row, only the part of one rank (`trainer.parallel.context`).
    """
    from penstock.trainer.memory_estimate import estimate_bytes

    section = config.trainer
    if states is not None:
        section = section.model_copy(update={"optimizer_states": states})
    tokens = -(-max(section.micro_batch_tokens, longest) // section.parallel.context)
    return estimate_bytes(outline, section, tokens=tokens, reference=config.algorithm.needs_reference)


def published_bytes(config: PenstockConfig, outline: "Outline") -> int:
    """Return the size of the snapshots of weights that lie on the GPU between trainer and engines.

    With an adapter there is also one snapshot of the frozen weights, which engines read at the start.
    """
    if not transport_of(config.sync.transport).snapshots_on_gpu:
        return 0
    once = outline.num_parameters if outline.num_adapter_parameters else 0
    item = BYTES[config.sync.wire_dtype(config.engine.dtype)]
    return (once + config.sync.num_snapshots * outline.num_trained) * item


def _check_trainer(
    config: PenstockConfig, outline: "Outline", gpu: Gpu, trainer: int, published: int, longest: int
) -> None:
    room = _room(gpu)
    if trainer + published <= room:
        return
    shard = f"trainer.parallel.shard above {config.trainer.parallel.shard}"
    advice = f"{_smaller_trainer(config, longest)} or {shard}"

    def held(states: str | None = None) -> int:
        """Return what each rank holds all the time."""
        return estimate_trainer(config, outline, longest=longest, states=states).resident // num_shards(
            config
        )

    if held() + CONTEXT_BYTES > room:
        modes = [
            mode
            for mode in SMALLER_STATES[config.trainer.optimizer_states]
            if held(mode) + CONTEXT_BYTES <= room
        ]
        way_out = f"set trainer.optimizer_states={' or '.join(modes)}, or " if modes else ""
        advice = (
            f"{gb(held())} of it are weights, gradients and AdamW's states: {way_out}split them over more GPUs "
            f"({shard}), or take a smaller model"
        )
    raise UserError(
        f"{_ranks(config)} needs about {gb(trainer)}{_and_published(published)}, and of the "
        f"{gb(gpu.total_bytes)} of {gpu.name} {gb(room)} can be used; {advice}"
    )


def _share_out(
    config: PenstockConfig, outline: "Outline", gpu: Gpu, trainer: int, published: int, longest: int
) -> MemoryPlan:
    from penstock.engines.embedded.cache_sizing import workspace_bytes

    own = _EngineSettings.of(config)
    count = 1 if config.placement.engines and not trainer else config.engine.num_most
    split = max(1, kind_of(config.engine.kind).num_gpus(settings_of(config.engine)))
    item = BYTES[config.engine.dtype]
    per_token = outline.kv_per_token * (1 if own.kv_dtype == "float8" else item) // split
    weights = (outline.num_parameters + _adapters(own, outline)) * item // split
    staged = transport_of(config.sync.transport).staged_bytes(
        outline.num_parameters * item, config.sync.selection
    )
    fixed = weights + staged + workspace_bytes(own.max_batch, outline.vocabulary)
    if own.kv_tokens:
        least, cache_words = own.kv_tokens * per_token, f"the cache that {own.path}.kv_tokens asks for"
    elif own.cache_gb:
        least, cache_words = int(own.cache_gb * 1e9), f"the cache that {own.path}.cache_gb asks for"
    else:
        least, cache_words = longest * per_token, f"a cache for one sequence of {longest} tokens"
    left = (_room(gpu) - trainer - published) // count
    asked = int(own.memory_share * gpu.total_bytes)
    engine = asked or min(left, int(ENGINE_ALONE * gpu.total_bytes) // count)
    beside = f"beside the trainer's {gb(trainer)}{_and_published(published)} " if trainer else ""
    if asked > left:
        most = max(0.0, left / gpu.total_bytes)
        raise UserError(
            f"{own.path}.memory_share must be at most {int(most * 100) / 100} {beside}on {gpu.name} "
            f"({gb(gpu.total_bytes)}, {gb(gpu.free_bytes)} of it free), got {own.memory_share}; "
            f"lower it, or {_smaller_trainer(config, longest) if trainer else 'free memory on the gpu'}"
        )
    if fixed + least > engine:
        raise UserError(
            f"an engine needs {gb(fixed + least)} ({gb(weights)} of weights,{_and_staged(staged)} a "
            f"workspace, and {gb(least)} for {cache_words}), and may take {gb(max(0, engine))} {beside}on "
            f"{gpu.name} ({gb(gpu.total_bytes)}, {gb(gpu.free_bytes)} of it free); "
            f"{_smaller_engine(config, asked > 0)}{', or ' + _smaller_trainer(config, longest) if trainer else ''}"
        )
    return MemoryPlan(
        gpu=gpu,
        trainer=trainer,
        published=published,
        engine=engine,
        cache=least if own.kv_tokens or own.cache_gb else engine - fixed,
        staged=staged,
        num_engines=config.engine.num_most,
        kv_bytes_per_token=per_token,
    )


def _adapters(own: "_EngineSettings", outline: "Outline") -> int:
    """Return how many numbers an engine holds for adapters: the matrices of all slots, or a second copy of the
    weights where one is merged."""
    if not outline.num_adapter_parameters:
        return 0
    if own.adapters == "merged":
        return outline.num_parameters + outline.num_adapter_parameters
    return outline.num_adapter_parameters * (own.max_adapters + SPARE_SLOTS)


def _room(gpu: Gpu) -> int:
    return gpu.free_bytes - int(MARGIN * gpu.total_bytes)


def _ranks(config: PenstockConfig) -> str:
    count = num_ranks(config)
    return "the trainer" if count == 1 else f"each of {count} ranks of the trainer"


def _smaller_trainer(config: PenstockConfig, longest: int) -> str:
    knobs = []
    if config.trainer.dtype == "float32":
        knobs.append("trainer.dtype=bfloat16")
    if modes := SMALLER_STATES[config.trainer.optimizer_states]:
        knobs.append(f"trainer.optimizer_states={' or '.join(modes)}")
    if config.trainer.checkpointing != "full":
        stronger = "selective" if config.trainer.checkpointing == "off" else "full"
        knobs.append(f"trainer.checkpointing={stronger}")
    if config.trainer.micro_batch_tokens > longest:
        knobs.append(f"trainer.micro_batch_tokens below {config.trainer.micro_batch_tokens}")
    else:  # one sequence is a micro-batch by itself
        knobs.append(f"trainer.parallel.context above {config.trainer.parallel.context}")
    if transport_of(config.sync.transport).snapshots_on_gpu:
        # With an adapter, nearly all of it is the frozen weights that engines read once, at the start.
        knobs += ["sync.transport=shared_memory"] if config.model.trains_adapter else []
        knobs += ["sync.slots=1"] if config.sync.slots > 1 and not config.model.trains_adapter else []
    return "set " + " or ".join(knobs)


def _smaller_engine(config: PenstockConfig, share_is_set: bool) -> str:
    own = _EngineSettings.of(config)
    knobs = [f"raise {own.path}.memory_share"] if share_is_set else []
    if own.kv_tokens or own.cache_gb:
        knobs.append(f"lower {own.path}.{'kv_tokens' if own.kv_tokens else 'cache_gb'}")
    if config.engine.dtype == "float32":
        knobs.append("set engine.dtype=bfloat16")
    if config.engine.num_most > 1:
        knobs.append(f"set engine.count below {config.engine.num_most}")
    knobs.append(f"set {own.path}.max_batch below {own.max_batch}")
    return " or ".join(knobs)


def _and_published(published: int) -> str:
    return f" and published weights {gb(published)}" if published else ""


def _and_staged(staged: int) -> str:
    return f" {gb(staged)} of an update that is staged," if staged else ""
