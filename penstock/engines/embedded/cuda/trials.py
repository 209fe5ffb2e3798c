"""Which of the library's algorithms makes a product fastest: tried at the start, on the GPU itself.

For 512 rows the library's first choice is not always its best: of a 7B model's widest product another one takes
5 % less. So the sizes that decode steps and full passes over prompts have are tried against what torch does, and
only what gives the same numbers and wins clearly is used. For a full batch, tiles that the library does not name
are tried too.

What is quickest for a moment need not be so for hours: products keep a GPU at its power limit, and the one that
takes less energy for the same numbers then runs at a higher clock. So of the product that is the most work the best
few are tried under load, beside torch's way.

What was found is kept for the next start (`kept_choices.py`).
"""

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock.engines.embedded.cuda import cublas
from penstock.engines.embedded.cuda.cublas import TYPES, Algorithm, CublasError, Handle, Product, library
from penstock.engines.embedded.cuda.kept_choices import KeptChoices, keep_choices
from penstock.engines.embedded.cuda.products import Choice, Choices, ChosenLinear, Epilogue, Size, product
from penstock.engines.embedded.joined_projections import JoinedLinear

log = logging.getLogger(__name__)

MIN_ROWS = 64
"""Smaller products read their weights and little else: there is nothing to win, but for an addition."""
ROUNDS = 5
MOST_WEIGHTS = 4
"""Weights that a trial goes through, so that none of them lies in the cache."""
WORTH = 0.99
"""A choice must take less than this share of torch's time."""
TOLERANCE = 0.01
NEAR = 1.05
"""Under load are tried torch's way, and those that take at most so many times as long as the quickest, for a
moment."""
FINALISTS, LAST = 10, 5
"""How many of those there are at most, and how many after a first turn; torch's way comes besides."""
LOADS = 4
LOAD_S = 0.12
"""How long each is kept running, at every turn; the second half counts. One turn is right to some 2 %."""

Timer = Callable[[float], float]
"""Milliseconds of one way of making a product; the GPU is kept busy with it for so many seconds, if not 0."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a product is made, and how to switch it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    switch: Callable[[], None]
    is_joined: bool = False
    """Whether its result is cut into parts."""


@torch.no_grad()
def choose_products(model: nn.Module, batches: Sequence[int], prompts: int) -> set[Size]:
    """Try the products of `model` for batches of so many rows, the last of them most thoroughly, and for passes
    over so many tokens of prompts; returns the sizes that have a better way.

    Modules that gain are switched to it. To be called after projections are joined and before layers are
    compiled."""
    device = next(model.parameters()).device
    groups = by_size(model)
    if not groups or device.type != "cuda" or library() is None:
        return set()
    found: set[Size] = set()
    try:
        if device not in Choices.handles:
            Choices.handles[device] = Handle(device, library())
        handle = Choices.handles[device]
        kept = keep_choices(device, handle.version, (__file__, cublas.__file__))
        head = _head(model)
        heaviest = max(groups.values(), key=lambda sites: len(sites) * sites[0].weight.numel())
        for sites in groups.values():
            is_head = any(site.weight.data_ptr() == head for site in sites)
            for size in sizes_of(sites[0], is_head, batches, prompts):
                if size not in Choices.known:
                    thorough = size.rows == batches[-1]
                    choice = _choose(
                        Trial.of(sites[:MOST_WEIGHTS], size, handle),
                        kept,
                        thorough=thorough,
                        under_load=thorough and sites is heaviest,
                    )
                    if choice is None:
                        continue
                    Choices.known[size] = choice
                    log.info("product %s: %s", size, choice)
                found.add(size)
                for site in sites:
                    site.switch()
    except (CublasError, torch.cuda.OutOfMemoryError) as error:
        log.warning("no more matrix products are tried, the others are left to torch: %s", error)
    else:
        kept.save()
    torch.cuda.empty_cache()  # trials of long passes take gigabytes
    return found


def sizes_of(site: Site, is_head: bool, batches: Sequence[int], prompts: int) -> Iterator[Size]:
    """What is worth a try. Of prompts only the last tokens have logits."""
    outer, inner = site.weight.shape
    for rows in dict.fromkeys(batches if is_head else [*batches, prompts]):
        size = Size(site.weight.device, site.weight.dtype, rows, outer, inner, Epilogue.NONE)
        if rows >= MIN_ROWS:
            yield size if site.bias is None else size._replace(epilogue=Epilogue.BIAS)
        if site.bias is None and not (is_head or site.is_joined):
            yield size._replace(epilogue=Epilogue.SUM)


def by_size(model: nn.Module) -> dict[tuple[torch.Size, bool], list[Site]]:
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
        return Site(module.family.weight, module.family.bias, switch, is_joined=True)
    if isinstance(module, nn.Linear) and type(module) in (nn.Linear, ChosenLinear):
        return Site(module.weight.data, module.bias, partial(setattr, module, "__class__", ChosenLinear))
    return None


@dataclass(frozen=True, slots=True)
class Trial:
    """A product with made-up inputs, and what torch makes of them."""

    sites: list[Site]
    product: Product
    x: torch.Tensor
    added: torch.Tensor | None
    out: torch.Tensor
    expected: torch.Tensor
    key: str

    @classmethod
    def of(cls, sites: list[Site], size: Size, handle: Handle) -> "Trial":
        is_bias = size.epilogue is Epilogue.BIAS
        made = Product(handle, size.rows, size.outer, size.inner, size.dtype, bias=is_bias)
        options: dict[str, Any] = {"dtype": size.dtype, "device": size.device}
        x = torch.randn(size.rows, size.inner, **options)
        added = torch.randn(size.rows, size.outer, **options) if size.epilogue is Epilogue.SUM else None
        out = torch.empty(size.rows, size.outer, **options)
        return cls(sites, made, x, added, out, _by_torch(x, added, sites[0]), f"{size.dtype} {size}")

    def way(self, algorithm: Algorithm) -> Callable[[Site], object]:
        return partial(_by_algorithm, self.product, algorithm, self.x, self.added, self.out)

    def is_possible(self, algorithm: Algorithm) -> bool:
        try:
            return self.product.is_valid(algorithm)
        except CublasError:
            return False

    def succeeds(self, algorithm: Algorithm) -> bool:
        """Whether it runs and gives the same numbers."""
        self.out.fill_(float("nan"))
        try:
            self.way(algorithm)(self.sites[0])
        except CublasError:  # the library may name what it then refuses
            return False
        return _norm(self.out - self.expected) <= TOLERANCE * _norm(self.expected)

    def fastest(self, *, thorough: bool, under_load: bool) -> Algorithm | None:
        """The algorithm that beats what torch does, if one does and gives the same numbers."""
        named = self.product.algorithms()
        tried = [*named, *(self.product.variations(named) if thorough else ())]
        algorithms = [each for each in tried if self.succeeds(each)]
        by_torch: Callable[[Site], object] = partial(_by_torch, self.x, self.added)
        ways = [by_torch, *(self.way(each) for each in algorithms)]
        best = quickest([_timer(way, self.sites) for way in ways], under_load=under_load)
        return algorithms[best - 1] if best else None


def _choose(trial: Trial, kept: KeptChoices, *, thorough: bool, under_load: bool) -> Choice | None:
    """What an earlier start chose, if it still works, or what a trial finds."""
    key = f"{trial.key}{', thorough' * thorough}{', under load' * under_load}"
    if key in kept:
        data = kept[key]
        if data is None:
            return None
        algorithm = Algorithm.of(data)
        if trial.is_possible(algorithm) and trial.succeeds(algorithm):
            return Choice(trial.product, algorithm)
    best = trial.fastest(thorough=thorough, under_load=under_load)
    kept[key] = None if best is None else bytes(best.data)
    return None if best is None else Choice(trial.product, best)


def _by_torch(x: torch.Tensor, added: torch.Tensor | None, site: Site) -> torch.Tensor:
    result = functional.linear(x, site.weight, site.bias)
    return result if added is None else added + result


def _by_algorithm(
    made: Product,
    algorithm: Algorithm,
    x: torch.Tensor,
    added: torch.Tensor | None,
    out: torch.Tensor,
    site: Site,
) -> None:
    made.run(algorithm, x, site.weight, out, bias=site.bias, added=added)


def _norm(matrix: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float32))


def _head(model: nn.Module) -> int:
    """The address of the weight that logits are made with; 0 if there is none."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    return head.weight.data_ptr() if isinstance(head, nn.Linear) else 0


def quickest(timers: list[Timer], *, under_load: bool = False) -> int:
    """Which of several ways is clearly quicker than the first, which is number 0. They take turns, so that all
    see the same clocks."""
    turns = _take_turns(timers, range(len(timers)), ROUNDS, 0.0)
    times = {number: statistics.median(taken) for number, taken in turns.items()}
    best = min(times, key=times.__getitem__)
    if under_load:
        near = [number for number in times if number and times[number] <= NEAR * times[best]]
        finalists = sorted(near, key=times.__getitem__)[:FINALISTS]
        timers[best](LOAD_S)  # a GPU that has rested is quicker than it will be
        first = _take_turns(timers, [0, *finalists], 1, LOAD_S)
        last = sorted(finalists, key=first.__getitem__)[:LAST]
        turns = _take_turns(timers, [0, *last], LOADS - 1, LOAD_S)
        times = {number: statistics.median(first[number] + taken) for number, taken in turns.items()}
        best = min(times, key=times.__getitem__)
    return best if times[best] < WORTH * times[0] else 0


def _take_turns(
    timers: list[Timer], numbers: Iterable[int], rounds: int, load_s: float
) -> dict[int, list[float]]:
    """Milliseconds of every turn, by number."""
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(rounds):
        for number, taken in times.items():
            taken.append(timers[number](load_s))
    return times


def _timer(way: Callable[[Site], object], sites: list[Site]) -> Timer:
    """Times one way through all weights, as a graph, since launching takes longer than a product. Under load, the
    second half counts."""
    way(sites[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for site in sites:
            way(site)

    def replays(count: int) -> float:
        event: Any = torch.cuda.Event
        events = [event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            graph.replay()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1])) / count

    def milliseconds(load_s: float) -> float:
        if not load_s:
            return replays(1)
        once = min(replays(1) for _ in range(3))
        half = max(1, round(load_s * 1000 / once / 2))
        replays(half)
        return replays(half)

    return milliseconds
