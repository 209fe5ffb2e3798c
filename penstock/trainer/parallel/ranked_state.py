"""A trainer's state from several ranks, as files, and read again by any number of ranks in any layout.

    trainer/index.json              how the ranks that wrote it were laid out
            rank-0/, rank-1/, …     each rank's own state (`penstock.trainer.state_files`), safetensors and JSON
                   shards.json      which part of each weight the rank had, in the order of its masters

A folder that one process wrote is a state of whole weights. Of the ranks that have the same parts, one writes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.errors import UserError
from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.local_shards import LocalShard
from penstock.trainer.parallel.rank_layout import RankLayout
from penstock.trainer.state_files import STATE, Reference, load_state, read_tree, unreadable, write_state

MOMENTS = ("exp_avg", "exp_avg_sq")
INDEX, SHARDS = "index.json", "shards.json"
Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and its sizes."""


def write_ranked(
    folder: Path,
    layout: RankLayout,
    plain: Any,
    tensors: Sequence[torch.Tensor],
    shards: Sequence[LocalShard],
) -> None:
    """This rank's part. Ranks whose parts others have too write nothing."""
    if layout.rank == 0:
        index = {"parallel": layout.parallel.model_dump(mode="json")}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    if layout.mesh_place["data"] > 0:
        return
    own = folder / f"rank-{layout.rank}"
    own.mkdir()
    write_state(own, plain, tensors)
    places = [{"start": shard.start, "sizes": tuple(shard.values.shape)} for shard in shards]
    (own / SHARDS).write_text(json.dumps(places), encoding="utf-8")


def load_ranked(
    folder: Path, layout: RankLayout | None, shards: Sequence[LocalShard], order: Sequence[int]
) -> dict[str, Any]:
    """The state for the masters whose parts are `shards`. `order` says which master AdamW's states are of."""
    wrote = _layout_of(folder)
    if wrote == (ParallelConfig() if layout is None else layout.parallel):
        at = 0 if layout is None else layout.rank % (layout.size // layout.parallel.data)
        state: dict[str, Any] = load_state(folder if layout is None else folder / f"rank-{at}")
        return state
    sources = [Source.of(path) for path in _sources(folder)]
    tree = sources[0].tree
    if tree["optimizer"]["states"] != "float32":
        raise UserError(
            f"a checkpoint with trainer.optimizer_states={tree['optimizer']['states']} must be read in the layout "
            f"that wrote it ({_said(wrote)}), got another; only float32 can be laid out anew"
        )
    try:
        return _assemble(sources, shards, order)
    except (OSError, KeyError, ValueError) as error:
        raise unreadable(folder, error) from error


@dataclass(frozen=True, slots=True)
class Source:
    """What one rank wrote, with references where tensors were."""

    folder: Path
    tree: dict[str, Any]
    places: Sequence[Place] | None
    """Of its masters; None: they are whole."""
    files: Mapping[str, Path]
    """By the number of a tensor, the file that holds it."""

    @classmethod
    def of(cls, folder: Path) -> "Source":
        tree, files = read_tree(folder)
        places = None
        if (folder / SHARDS).exists():
            read = json.loads((folder / SHARDS).read_text(encoding="utf-8"))
            places = [(tuple(each["start"]), tuple(each["sizes"])) for each in read]
        return cls(folder, tree, places, files)

    def read(self, reference: Reference, master: int, shard: LocalShard, into: torch.Tensor) -> None:
        """Copy what this source has of a tensor that lies as its master does."""
        start, sizes = (0,) * len(shard.shape), shard.shape
        if self.places is not None:
            start, sizes = self.places[master]
        cuts = [
            (max(theirs, ours), min(theirs + size, ours + extent))
            for theirs, size, ours, extent in zip(start, sizes, shard.start, into.shape, strict=True)
        ]
        if any(first >= last for first, last in cuts):
            return
        theirs = tuple(slice(a - at, b - at) for (a, b), at in zip(cuts, start, strict=True))
        ours = tuple(slice(a - at, b - at) for (a, b), at in zip(cuts, shard.start, strict=True))
        with safe_open(self.files[reference.number], framework="pt") as file:
            into[ours] = (
                file.get_slice(reference.number)[theirs] if theirs else file.get_tensor(reference.number)
            )

    def whole(self, reference: Reference) -> torch.Tensor:
        with safe_open(self.files[reference.number], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(reference.number)
            return tensor


def _assemble(
    sources: Sequence[Source], shards: Sequence[LocalShard], order: Sequence[int]
) -> dict[str, Any]:
    first = sources[0]
    state: dict[str, Any] = _resolved(first, {**first.tree, "optimizer": None})
    optimizer = first.tree["optimizer"]
    masters = [_collect(sources, ("masters", master), master, shard) for master, shard in enumerate(shards)]
    moments: dict[int, dict[str, Any]] = {}
    for number, known in optimizer["adamw"]["state"].items():
        master = order[number]
        moments[number] = {
            name: _collect(sources, ("adamw", "state", number, name), master, shards[master])
            if name in MOMENTS
            else _resolved(first, value)
            for name, value in known.items()
        }
    groups = _resolved(first, optimizer["adamw"]["param_groups"])
    state["optimizer"] = {
        "states": optimizer["states"],
        "adamw": {"state": moments, "param_groups": groups},
        "masters": masters,
    }
    return state


def _collect(
    sources: Sequence[Source], path: Sequence[str | int], master: int, shard: LocalShard
) -> torch.Tensor:
    """One tensor that lies as its master does, from all that have a part of it."""
    into = torch.empty(shard.values.shape, dtype=torch.float32)
    for source in sources:
        found: Any = source.tree["optimizer"]
        for key in path:
            found = found[key]
        source.read(found, master, shard, into)
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


def _sources(folder: Path) -> list[Path]:
    if (folder / STATE).exists():
        return [folder]
    return sorted(folder.glob("rank-*"), key=lambda path: int(path.name.partition("-")[2]))


def _said(parallel: ParallelConfig) -> str:
    sizes = {name: size for name, size in parallel.model_dump().items() if size > 1}
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one rank"
