"""Writes a trainer's state from several ranks as files, and reads it again with any number of ranks in any layout.

    trainer/index.json              how the ranks that wrote it were laid out
            rank-0/, rank-1/, …     each rank's own state (`checkpoint/state_files.py`), safetensors and JSON
                   shards.json      which part of each weight the rank had, in the order of its masters

A folder that one process wrote is a state of whole weights. Of the ranks that have the same parts, one writes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.checksums import Checksum
from penstock.errors import UserError
from penstock.trainer.checkpoint.state_files import (
    STATE,
    Reference,
    load_state,
    read_tree,
    unreadable,
    write_state,
)
from penstock.trainer.config import ParallelConfig
from penstock.trainer.optimizers import host_adamw
from penstock.trainer.optimizers.host_adamw import cut_masters
from penstock.trainer.parallel.local_shards import LocalShard
from penstock.trainer.parallel.rank_layout import RankLayout

MOMENTS = ("exp_avg", "exp_avg_sq")
INDEX, SHARDS = "index.json", "shards.json"
Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset of a part of a tensor, and its sizes."""


def write_ranked(
    folder: Path,
    layout: RankLayout,
    plain: Any,
    tensors: Sequence[torch.Tensor],
    shards: Sequence[LocalShard],
) -> dict[Path, Checksum]:
    """Write this rank's part, unless a rank of another copy writes the same part. Return the checksums of the
    tensor files."""
    if layout.rank == 0:
        index = {"parallel": layout.parallel.model_dump(mode="json")}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    if layout.mesh_coordinate["data"] > 0:
        return {}
    own = folder / f"rank-{layout.rank}"
    own.mkdir()
    sums = write_state(own, plain, tensors)
    extents = [{"start": shard.start, "sizes": tuple(shard.values.shape)} for shard in shards]
    (own / SHARDS).write_text(json.dumps(extents), encoding="utf-8")
    return sums


def load_ranked(
    folder: Path, layout: RankLayout | None, shards: Sequence[LocalShard], order: Sequence[int]
) -> dict[str, Any]:
    """Load the state for the masters whose parts are `shards`. `order[i]` is the master that AdamW's state i
    belongs to. Raise `UserError` for 8-bit states of another layout."""
    wrote = _layout_of(folder)
    wanted = ParallelConfig() if layout is None else layout.parallel
    if _of_a_copy(wrote) == _of_a_copy(wanted):
        at = 0 if layout is None else layout.rank % (layout.size // wanted.data)
        is_whole = (folder / STATE).exists()
        state: dict[str, Any] = load_state(folder if is_whole else folder / f"rank-{at}")
        return state
    sources = [Source.of(path) for path in _sources(folder)]
    states = sources[0].tree["optimizer"]["states"]
    if states == "8bit":
        raise UserError(
            f"a checkpoint with trainer.optimizer_states=8bit must be read in the layout that wrote it "
            f"({_said(wrote)}) or with another number of copies (trainer.parallel.data), got {_said(wanted)}; only "
            "float32 and cpu can be loaded in another layout"
        )
    try:
        return _assemble(sources, shards, order, cut=states == "cpu")
    except (OSError, KeyError, ValueError) as error:
        raise unreadable(folder, error) from error


@dataclass(frozen=True, slots=True)
class Source:
    """Holds what one rank wrote, with references where tensors were."""

    folder: Path
    tree: dict[str, Any]
    extents: Sequence[Extent] | None
    """The extents of its masters; None if they are whole."""
    files: Mapping[str, Path]
    """The file that holds each tensor, by the tensor's number."""

    @classmethod
    def of(cls, folder: Path) -> "Source":
        tree, files = read_tree(folder)
        extents = None
        if (folder / SHARDS).exists():
            read = json.loads((folder / SHARDS).read_text(encoding="utf-8"))
            extents = [(tuple(each["start"]), tuple(each["sizes"])) for each in read]
        return cls(folder, tree, extents, files)

    def sizes(self, shards: Sequence[LocalShard]) -> list[tuple[int, ...]]:
        """Return the sizes of this source's masters."""
        return [self._place(master, shard)[1] for master, shard in enumerate(shards)]

    def _place(self, master: int, shard: LocalShard) -> Extent:
        return ((0,) * len(shard.shape), shard.shape) if self.extents is None else self.extents[master]

    def read(
        self, part: Reference | torch.Tensor, master: int, shard: LocalShard, into: torch.Tensor
    ) -> None:
        """Copy into `into`, this rank's part of a tensor, what this source has of that part. The tensor is laid out
        like its master."""
        start, sizes = self._place(master, shard)
        cuts = [
            (max(theirs, ours), min(theirs + size, ours + extent))
            for theirs, size, ours, extent in zip(start, sizes, shard.start, into.shape, strict=True)
        ]
        if any(first >= last for first, last in cuts):
            return
        theirs = tuple(slice(a - at, b - at) for (a, b), at in zip(cuts, start, strict=True))
        ours = tuple(slice(a - at, b - at) for (a, b), at in zip(cuts, shard.start, strict=True))
        if isinstance(part, torch.Tensor):
            into[ours] = part.view(sizes)[theirs]
            return
        with safe_open(self.files[part.number], framework="pt") as file:
            into[ours] = file.get_slice(part.number)[theirs] if theirs else file.get_tensor(part.number)

    def whole(self, reference: Reference) -> torch.Tensor:
        with safe_open(self.files[reference.number], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(reference.number)
            return tensor


def _assemble(
    sources: Sequence[Source], shards: Sequence[LocalShard], order: Sequence[int], *, cut: bool
) -> dict[str, Any]:
    """Assemble this rank's state. With `cut`, AdamW's states belong to slices of the masters, as
    `penstock.trainer.optimizers.host_adamw` makes them."""
    first = sources[0]
    state: dict[str, Any] = _resolved(first, {**first.tree, "optimizer": None})
    optimizer = first.tree["optimizer"]
    moments = _of_slices(sources, shards, order) if cut else _of_masters(sources, shards, order)
    groups = _resolved(first, optimizer["adamw"]["param_groups"])
    state["optimizer"] = {
        "states": optimizer["states"],
        "adamw": {
            "state": moments,
            "param_groups": _renumbered(groups, sources[0], shards, order) if cut else groups,
        },
        "masters": [
            _collect(
                [(source, source.tree["optimizer"]["masters"][master]) for source in sources], master, shard
            )
            for master, shard in enumerate(shards)
        ],
    }
    return state


def _of_masters(
    sources: Sequence[Source], shards: Sequence[LocalShard], order: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return AdamW's states by the number of a master."""
    states = [source.tree["optimizer"]["adamw"]["state"] for source in sources]
    return {
        number: {
            name: _collect(
                [(source, state[number][name]) for source, state in zip(sources, states, strict=True)],
                order[number],
                shards[order[number]],
            )
            if name in MOMENTS
            else _resolved(sources[0], value)
            for name, value in known.items()
        }
        for number, known in states[0].items()
    }


def _of_slices(
    sources: Sequence[Source], shards: Sequence[LocalShard], order: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return AdamW's states by the number of a slice: assembled for each master, and cut as this rank cuts it."""
    whole: dict[tuple[int, str], torch.Tensor] = {}
    found: dict[int, dict[str, Any]] = {}
    numbers = [_numbers(source.sizes(shards), order) for source in sources]
    for number, (master, start, stop) in enumerate(_slices([s.values.shape for s in shards], order)):
        known = next(
            (
                (source, source.tree["optimizer"]["adamw"]["state"][slices[master][0]])
                for source, slices in zip(sources, numbers, strict=True)
                if slices[master] and slices[master][0] in source.tree["optimizer"]["adamw"]["state"]
            ),
            None,
        )
        if known is None:  # it was never updated
            continue
        found[number] = {}
        for name, value in known[1].items():
            if name not in MOMENTS:
                found[number][name] = _resolved(known[0], value)
                continue
            if (master, name) not in whole:
                parts = [
                    (source, _joined(source, slices[master], name))
                    for source, slices in zip(sources, numbers, strict=True)
                ]
                whole[master, name] = _collect(parts, master, shards[master])
            found[number][name] = whole[master, name].view(-1)[start:stop].clone()
    return found


def _joined(source: Source, numbers: Sequence[int], name: str) -> torch.Tensor:
    """Concatenate a moment of a source's part of one master, flat."""
    states = source.tree["optimizer"]["adamw"]["state"]
    parts = [source.whole(states[number][name]) for number in numbers]
    return torch.cat(parts) if parts else torch.empty(0)


def _renumbered(
    groups: Sequence[dict[str, Any]], source: Source, shards: Sequence[LocalShard], order: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the weight decay groups with the numbers of this rank's slices of their masters."""
    theirs = [master for master, _, _ in _slices(source.sizes(shards), order)]
    ours = [master for master, _, _ in _slices([shard.values.shape for shard in shards], order)]
    members = [{theirs[number] for number in group["params"]} for group in groups]
    return [
        {**group, "params": [number for number, master in enumerate(ours) if master in inside]}
        for group, inside in zip(groups, members, strict=True)
    ]


def _slices(shapes: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut masters of these shapes into slices (master, start, stop), as AdamW numbers them."""
    rank = {master: index for index, master in enumerate(order)}
    buckets = cut_masters([math.prod(shape) for shape in shapes], room=host_adamw.BUCKET_VALUES)
    cut = [piece for bucket in buckets for piece in bucket]
    return sorted(cut, key=lambda piece: (rank[piece[0]], piece[1]))


def _numbers(shapes: Sequence[Sequence[int]], order: Sequence[int]) -> list[list[int]]:
    numbers: list[list[int]] = [[] for _ in shapes]
    for number, (master, _, _) in enumerate(_slices(shapes, order)):
        numbers[master].append(number)
    return numbers


def _collect(
    parts: Sequence[tuple[Source, Reference | torch.Tensor]], master: int, shard: LocalShard
) -> torch.Tensor:
    """Assemble one tensor, laid out like its master, from all sources that have a part of it."""
    into = torch.empty(shard.values.shape, dtype=torch.float32)
    for source, part in parts:
        source.read(part, master, shard, into)
    return into


def _resolved(source: Source, value: Any) -> Any:
    if isinstance(value, Reference):
        return source.whole(value)
    if isinstance(value, dict):
        return {key: _resolved(source, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolved(source, item) for item in value)
    return value


def _layout_of(folder: Path) -> ParallelConfig:
    if (folder / STATE).exists():
        return ParallelConfig()
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return ParallelConfig.model_validate(index["parallel"])
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(folder, error) from error


def _of_a_copy(parallel: ParallelConfig) -> ParallelConfig:
    return parallel.model_copy(update={"data": 1})


def _sources(folder: Path) -> list[Path]:
    if (folder / STATE).exists():
        return [folder]
    return sorted(folder.glob("rank-*"), key=lambda path: int(path.name.partition("-")[2]))


def _said(parallel: ParallelConfig) -> str:
    sizes = {name: size for name, size in parallel.model_dump().items() if size > 1}
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one rank"
