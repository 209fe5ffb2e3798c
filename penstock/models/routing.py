"""Records or replays which experts the routers of a mixture-of-experts model choose.

Families differ in how they score experts and in what they make of the scores, but all of them choose with one
`topk(scores, k)` over a (tokens, experts) matrix. Only that call is intercepted, so nothing here depends on the
family. Its ids are recorded (`Recording`), or replaced by ids that were recorded before (`Replay`). The router then
takes its weights from its own scores at these ids, so it keeps its gradient.

Compiled code (`torch.compile`) must serve routers of all layers, with and without recording. So the observer is
looked up at each choice: a router has a *handle*, an empty tensor with a reference to its `Routers`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.errors import UserError
from penstock.models.expert_count import num_experts_of
from penstock.records import RoutingShape

TOPK = (torch.topk, torch.Tensor.topk)


class Choices(Protocol):
    """Observes every choice of a forward pass, and may replace it."""

    def choose(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids that router number `layer`, which chose `ids`, must use, as a new tensor."""


class Recording:
    """Records what every router chooses, or what `choices` answers; `ids` has one (tokens, k) tensor per router."""

    def __init__(self, num_layers: int, choices: Choices | None = None) -> None:
        self.ids: list[torch.Tensor | None] = [None] * num_layers
        self._choices = choices

    def choose(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        if self._choices is not None:
            ids = self._choices.choose(layer, ids)
        self.ids[layer] = ids
        return ids.clone()


class Replay:
    """Answers with recorded ids, (layers, tokens, k). A token that is not `known` keeps the ids that the router
    chose."""

    def __init__(self, ids: torch.Tensor, known: torch.Tensor, *, all_known: bool = False) -> None:
        """Keep the records. `all_known` says that every token is known, which `known` would reveal only after a
        wait for the device."""
        self._ids, self._known, self._all_known = ids, known, all_known
        self._flipped: list[torch.Tensor | None] = [None] * len(ids)

    def choose(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        recorded = self._ids[layer].to(ids.dtype)
        if recorded.shape != ids.shape:
            raise ValueError(
                f"a router chose ids of shape {tuple(ids.shape)}, and {tuple(recorded.shape)} are recorded"
            )
        if self._flipped[layer] is None:  # a layer that is recomputed in backward would give the same count
            # No id occurs twice in a choice, so two choices are the same set if each id of one is in the other.
            is_same = (recorded[:, :, None] == ids[:, None, :]).any(dim=2).all(dim=1)
            self._flipped[layer] = (self._known & ~is_same).sum()
        if self._all_known:
            return recorded.clone() if recorded.dtype == self._ids.dtype else recorded
        return torch.where(self._known[:, None], recorded, ids)

    @property
    def num_flipped(self) -> torch.Tensor:
        """Return for how many (layer, token) pairs the router itself chose other experts than the record."""
        return torch.stack([count for count in self._flipped if count is not None]).sum()


class Routers:
    """Holds all routers of a model, in the order in which a forward pass reaches them.

    `choices` observes their choices in every thread from the moment it is set. Layers that are recomputed in
    backward are answered as in forward, as long as no other pass has begun.
    """

    def __init__(self, modules: Sequence[nn.Module], shape: RoutingShape) -> None:
        self.shape = shape
        self.choices: Choices | None = None
        self._modules = list(modules)
        self._handles = [self._handle(layer, module) for layer, module in enumerate(modules)]

    def watch(self) -> None:
        """Intercept the routers' choices. Until this call the model is unchanged."""
        for module, handle in zip(self._modules, self._handles, strict=True):
            module.__class__ = _watched_class(type(module))
            module._penstock_watch = (handle, self.shape.num_experts)  # type: ignore[assignment]

    def choose(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Return what `choices` answers, or a copy of the same ids if no observer is set."""
        return ids.clone() if self.choices is None else self.choices.choose(layer, ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Routers":
        """Return the same object: a copied model shares its observer with the original until its own routers are
        found."""
        return self

    def _handle(self, layer: int, module: nn.Module) -> torch.Tensor:
        handle = torch.empty(0, device=next(module.parameters()).device)
        handle._penstock_router = (self, layer)  # type: ignore[attr-defined]
        return handle

    @contextmanager
    def observed_by(self, choices: Choices | None) -> Iterator[None]:
        """Set the observer for the duration of the block."""
        before, self.choices = self.choices, choices
        try:
            yield
        finally:
            self.choices = before


@torch.library.custom_op("penstock::choose_experts", mutates_args=())
def choose_experts(ids: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """Return the ids that the router of this handle, which chose `ids`, must use."""
    routers: Routers
    routers, layer = handle._penstock_router  # type: ignore[attr-defined]
    return routers.choose(layer, ids)


@choose_experts.register_fake
def _(ids: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ids)


@torch.library.custom_op("penstock::scores_at", mutates_args=())
def scores_at(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the scores of chosen experts as a separate tensor. A compiler would fuse a plain `gather` into the
    code that reads it, the sums over experts, and repeat it for every element of a hidden state."""
    return scores.gather(1, ids)


@scores_at.register_fake
def _(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ids, dtype=scores.dtype)


def _keep_ids(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    scores, ids = inputs
    ctx.save_for_backward(ids)
    ctx.num_experts = scores.shape[1]


def _score_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (ids,) = ctx.saved_tensors
    zeros = gradient.new_zeros((gradient.shape[0], ctx.num_experts))
    return zeros.scatter_add(1, ids, gradient), None


scores_at.register_autograd(_score_gradient, setup_context=_keep_ids)


class _Watched:
    """Runs a router's forward with its choice intercepted. It is mixed into the router's class; parameter names
    stay the same."""

    _penstock_watch: tuple[torch.Tensor, int] | None
    """Its handle, and the number of experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watch = self._penstock_watch
        if watch is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        handle, num_experts = watch
        with _Topk(num_experts, lambda ids: choose_experts(ids, handle)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def _watched_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, _Watched):
        return kind
    known = kind.__dict__.get("_penstock_watched")
    if known is None:
        known = type(kind.__name__, (_Watched, kind), {"__module__": kind.__module__})
        kind._penstock_watched = known  # type: ignore[attr-defined]
    chosen: type[nn.Module] = known
    return chosen


class _Chosen(NamedTuple):
    """Mirrors what `topk` returns."""

    values: torch.Tensor
    indices: torch.Tensor


class _Topk(TorchFunctionMode):
    """Passes the ids of each choice among experts to `answer`, and uses the ids that it returns."""

    def __init__(self, num_experts: int, answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._num_experts, self._answer = num_experts, answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.dim() != 2 or scores.shape[1] != self._num_experts:
            return result
        ids = self._answer(result[1])
        # Decode steps have so few tokens that one more kernel costs more than a fused gather.
        values = scores_at(scores, ids) if scores.requires_grad else scores.gather(1, ids)
        return _Chosen(values, ids)


def unwatch(model: nn.Module) -> None:
    """Stop intercepting the routers of a model, whichever `Routers` did it."""
    for module in model.modules():
        if isinstance(module, _Watched):
            module._penstock_watch = None


def find_routers(model: nn.Module, run: Callable[[], object]) -> Routers | None:
    """Find the routers of a model while `run` computes one token with it; return None for a dense model. A model
    is refused if its routers do not choose exactly once for the token in every layer that has experts."""
    num_experts = num_experts_of(model.config)
    if not num_experts:
        return None
    family = type(model).__name__
    unwatch(model)
    calls = _calls(model, num_experts, run)
    names = {module: name for name, module in model.named_modules()}
    chosen = Counter(_layer_of(names[module]) for module, _ in calls)
    layers = {_layer_of(name) for name in expert_names(model, num_experts)}
    if not calls or max(chosen.values()) > 1 or not layers <= set(chosen):
        found = ", ".join(f"{count} in {name}" for name, count in chosen.items()) or "none"
        raise UserError(
            f"{family}'s choice of experts can't be recorded: each of its {len(layers)} layers with experts must "
            f"choose with exactly one topk over {num_experts} scores, got {found}; "
            "set engine.record_routing=off to train it without"
        )
    sizes = {size for _, size in calls}
    if len(sizes) != 1:
        raise UserError(
            f"{family}'s choice of experts can't be recorded: all of its routers must choose equally many, got "
            f"{', '.join(map(str, sorted(sizes)))}; set engine.record_routing=off to train it without"
        )
    shape = RoutingShape(family=family, num_layers=len(calls), num_experts=num_experts, top_k=sizes.pop())
    return Routers([module for module, _ in calls], shape)


def _calls(model: nn.Module, num_experts: int, run: Callable[[], object]) -> list[tuple[nn.Module, int]]:
    """Return each choice of a forward pass: the innermost module that made it, and how many experts it chose."""
    inside: list[nn.Module] = []
    calls: list[tuple[nn.Module, int]] = []

    def enter(module: nn.Module, args: Any) -> None:
        inside.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    def note(ids: torch.Tensor) -> torch.Tensor:
        calls.append((inside[-1], int(ids.shape[1])))
        return ids

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        with _Topk(num_experts, note):
            run()
    return calls


def expert_names(model: nn.Module, num_experts: int) -> list[str]:
    """Return the parameters that hold a matrix for each expert, as transformers stores them: one tensor for all."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and parameter.shape[0] == num_experts
    ]


def _layer_of(name: str) -> str:
    """Return a module's layer, such as `model.layers.3`: its name up to the first number."""
    parts = name.split(".")
    end = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: end + 1])
