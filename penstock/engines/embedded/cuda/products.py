"""Matrix products of the engine, each by the algorithm that was fastest for its size when it was tried.

For 512 rows the library's first choice is not always its best: of a 7B model's widest product another one takes
5 % less. So the sizes that decode steps and full passes over prompts have are tried at the start, against torch's
own choice, and only what wins clearly is used. For a full batch, tiles that the library does not name are tried
too. Sizes that nobody tried are left to torch.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from penstock.engines.embedded.cuda.cublas import TYPES, Algorithm, CublasError, Handle, Product, library
from penstock.models.joined import JoinedLinear

log = logging.getLogger(__name__)

MIN_ROWS = 64
"""Smaller products read their weights and little else: there is nothing to win."""
ROUNDS = 5
MOST_WEIGHTS = 4
"""Weights that a trial goes through, so that none of them lies in the cache."""
WORTH = 0.99
"""A choice must take less than this share of torch's time."""
TOLERANCE = 0.01

ALIGNMENT = 256
"""Bytes: what the library assumes when it names algorithms."""

Size = tuple[torch.device, torch.dtype, int, int, int, bool]
"""Where, in which type, rows, outer and inner size, and whether there is a bias."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How products of one size are made."""

    product: Product
    algorithm: Algorithm


class Choices:
    """What was found to be faster than torch, for all engines of this process."""

    known: ClassVar[dict[Size, Choice]] = {}
    handles: ClassVar[dict[torch.device, Handle]] = {}


@torch.library.custom_op("penstock::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear`, by the chosen algorithm where there is one for this size."""
    outer, inner = weight.shape
    choice = Choices.known.get((x.device, x.dtype, x.numel() // inner, outer, inner, bias is not None))
    if choice is None or not (_fits(x) and _fits(weight)):
        return functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], outer)
    choice.product.run(choice.algorithm, x, weight, bias, out)
    return out


def _fits(tensor: torch.Tensor) -> bool:
    """Algorithms were chosen for dense matrices that begin where allocations do."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class ChosenLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(input, self.weight, self.bias)
        return result


@torch.no_grad()
def choose_products(model: nn.Module, batches: Sequence[int], prompts: int) -> int:
    """Try the products of `model` for batches of so many rows, the last of them most thoroughly, and for passes
    over so many tokens of prompts; returns how many sizes have a better way.

    Modules that gain are switched to it. To be called after projections are joined and before layers are
    compiled."""
    device = next(model.parameters()).device
    groups = _by_size(model)
    if not groups or device.type != "cuda" or library() is None:
        return 0
    try:
        if device not in Choices.handles:
            Choices.handles[device] = Handle(device, library())
        head = _head(model)
        found = 0
        for sites in groups.values():
            few_rows = any(site.weight.data_ptr() == head for site in sites)  # only last tokens have logits
            rows = [*batches] if few_rows else [*batches, prompts]
            found += _choose(sites, rows, batches[-1], Choices.handles[device])
        return found
    except (CublasError, torch.cuda.OutOfMemoryError) as error:
        log.warning("no more matrix products are tried, the others are left to torch: %s", error)
        return 0


@dataclass(frozen=True, slots=True)
class Site:
    """Where a product is made, and how to switch it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    switch: Callable[[], None]


def _by_size(model: nn.Module) -> dict[tuple[torch.Size, bool], list[Site]]:
    """Linear layers of 16 bits and joined families, by the size of their weights."""
    groups: dict[tuple[torch.Size, bool], list[Site]] = {}
    for module in model.modules():
        site = _site(module)
        if site is not None and site.weight.dtype in TYPES:
            groups.setdefault((site.weight.shape, site.bias is not None), []).append(site)
    return groups


def _site(module: nn.Module) -> Site | None:
    if isinstance(module, JoinedLinear):
        if module.number > 0:  # the first of a family multiplies for all
            return None
        switch = partial(setattr, module.family, "multiply", product)
        return Site(module.family.weight, module.family.bias, switch)
    if isinstance(module, nn.Linear) and type(module) in (nn.Linear, ChosenLinear):
        return Site(module.weight.data, module.bias, partial(setattr, module, "__class__", ChosenLinear))
    return None


def _choose(sites: list[Site], rows: list[int], full: int, handle: Handle) -> int:
    """Try one size of weight with each number of rows; `full` is that of a full batch."""
    found = 0
    for count in rows:
        if count < MIN_ROWS:
            continue
        weight = sites[0].weight
        outer, inner = weight.shape
        size = (weight.device, weight.dtype, count, outer, inner, sites[0].bias is not None)
        if size not in Choices.known:
            choice = _fastest(sites[:MOST_WEIGHTS], count, handle, thorough=count == full)
            if choice is None:
                continue
            Choices.known[size] = choice
        found += 1
    if found:
        for site in sites:
            site.switch()
    return found


def _fastest(sites: list[Site], rows: int, handle: Handle, *, thorough: bool) -> Choice | None:
    """The algorithm that beats torch's choice, if one does and gives the same numbers."""
    weight, bias = sites[0].weight, sites[0].bias
    outer, inner = weight.shape
    made = Product(handle, rows=rows, outer=outer, inner=inner, dtype=weight.dtype, bias=bias is not None)
    x = torch.randn(rows, inner, dtype=weight.dtype, device=weight.device)
    out = torch.empty(rows, outer, dtype=weight.dtype, device=weight.device)
    expected = functional.linear(x, weight, bias)
    size = _norm(expected)
    ways: list[Callable[[Site], object]] = [lambda site: functional.linear(x, site.weight, site.bias)]
    algorithms: list[Algorithm] = []
    named = made.algorithms()
    for algorithm in [*named, *(made.variations(named) if thorough else ())]:
        out.fill_(float("nan"))
        try:
            made.run(algorithm, x, weight, bias, out)
        except CublasError:  # the library may name what it then refuses
            continue
        if _norm(out - expected) <= TOLERANCE * size:
            algorithms.append(algorithm)
            ways.append(partial(_run, made, algorithm, x, out))
    best = quickest([_timer(way, sites) for way in ways])
    return Choice(made, algorithms[best - 1]) if best else None


def _norm(matrix: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float32))


def _head(model: nn.Module) -> int:
    """The address of the weight that logits are made with; 0 if there is none."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    return head.weight.data_ptr() if isinstance(head, nn.Linear) else 0


def _run(made: Product, algorithm: Algorithm, x: torch.Tensor, out: torch.Tensor, site: Site) -> None:
    made.run(algorithm, x, site.weight, site.bias, out)


def quickest(timers: list[Callable[[], float]]) -> int:
    """Which of several ways is clearly quicker than the first, which is number 0. They take turns, so that all
    see the same clocks."""
    times: list[list[float]] = [[] for _ in timers]
    for _ in range(ROUNDS):
        for number, timer in enumerate(timers):
            times[number].append(timer())
    medians = [statistics.median(each) for each in times]
    best = min(range(len(medians)), key=medians.__getitem__)
    return best if medians[best] < WORTH * medians[0] else 0


def _timer(way: Callable[[Site], object], sites: list[Site]) -> Callable[[], float]:
    """Milliseconds of one way through all weights: as a graph, since launching takes longer than a product."""
    way(sites[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for site in sites:
            way(site)

    def milliseconds() -> float:
        event: Any = torch.cuda.Event
        events = [event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1]))

    return milliseconds
