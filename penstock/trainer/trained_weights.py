"""Provides the weights that a trainer trains to other parts: published to engines, gathered from ranks, saved."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.checksums import Checksum
from penstock.models.published import published_tensors, wire_dtypes
from penstock.models.saving import write_config, write_weights
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.parallel.local_shards import LocalShard, local_values, own_shards
from penstock.trainer.parallel.rank_layout import RankLayout

if TYPE_CHECKING:
    from penstock.trainer.parallel.process_ranks import GroupRanks


class TrainedWeights:
    """Gives access to the weights that a step changes: a model's, or those of its adapter. With several ranks,
    each has its part."""

    def __init__(
        self,
        model: Any,
        adapter: TrainedAdapter | None,
        *,
        saved_dtype: torch.dtype | None = None,
        layout: RankLayout | None = None,
        ranks: "GroupRanks | None" = None,
    ) -> None:
        """`saved_dtype` is the number format of the checkpoint that the model came from; None saves the weights
        as they are. `ranks` gather what is saved, in a process group that nothing else uses."""
        self._model = model
        self._adapter = adapter
        self._saved_dtype = saved_dtype
        self._layout = layout
        self._ranks = ranks
        self._saved: tuple[dict[str, LocalShard], dict[str, str]] | None = None
        """Found once, between two steps: asking a split model for its tensors releases what a step has gathered,
        and checkpoints are written during steps. The parts keep their memory."""

    def starting_weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return what engines need before the first step, in order: an adapter's base weights come first."""
        below = [] if self._adapter is None else [self._own(self._adapter.base_tensors())]
        return [*below, self.weights()]

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return what a step changes, not copied and as engines name it: parameters and persistent buffers, or the
        adapter's tensors. With several ranks, each has its part (`shards`)."""
        if self._adapter is not None:
            return self._own(self._adapter.tensors())
        return self._own({name: tensor.detach() for name, tensor in published_tensors(self._model).items()})

    def shards(self) -> Mapping[str, LocalShard]:
        """Return where this rank's parts of all published tensors begin and end; empty if there is one rank."""
        if self._layout is None:
            return {}
        below = {} if self._adapter is None else self._adapter.base_tensors()
        own = published_tensors(self._model) if self._adapter is None else self._adapter.tensors()
        return own_shards({**below, **own}, self._layout)

    def _own(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if self._layout is None:
            return tensors
        return {name: shard.values for name, shard in own_shards(tensors, self._layout).items()}

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes what belongs to all ranks."""
        return self._layout is None or self._layout.rank == 0

    def save(self, folder: Path) -> dict[Path, Checksum]:
        """Write the model in Hugging Face format, in its checkpoint's number format, or the adapter in peft's
        format."""
        tensors = self.gather(self.own_saved())
        if not self.is_first:
            return {}
        self.write_config(folder)
        return self.write_weights(folder, tensors)

    def gather(self, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Gather all weights to be saved on the first rank, from the parts of all ranks or copies of them. Every
        rank must call it."""
        if self._ranks is None:
            return own
        from penstock.trainer.parallel.gathered_model import gather_model

        assert self._saved is not None
        shards, names = self._saved
        given = {name: replace(shards[name], values=values) for name, values in own.items()}
        whole = gather_model(given, list(dict.fromkeys(names.values())), self._ranks)
        return {name: whole[sent] for name, sent in names.items()} if self.is_first else {}

    @property
    def saved_bytes(self) -> int:
        """Return about how many bytes of weights `save` writes."""
        if self._adapter is not None:
            return sum(tensor.nbytes for tensor in self._adapter.tensors().values())
        tensors = published_tensors(self._model)
        dtypes = {} if self._saved_dtype is None else wire_dtypes(self._model, self._saved_dtype, tensors)
        return sum(
            tensor.numel() * dtypes.get(name, tensor.dtype).itemsize for name, tensor in tensors.items()
        )

    def write_config(self, folder: Path) -> None:
        """Write what belongs to a saved model besides weights and tokenizer. An adapter's config is written with
        its weights."""
        if self._adapter is None:
            write_config(self._model, folder, self._saved_dtype)

    def write_weights(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> dict[Path, Checksum]:
        """Write the weights of a `checkpoint_state`, or the present ones; it may run beside a step. Return the
        checksums that it computed."""
        if self._adapter is not None:
            self._adapter.save(folder, weights)
            return {}
        return write_weights(self._model, folder, self._saved_dtype, weights)

    def _saved_tensors(self) -> Mapping[str, torch.Tensor]:
        tensors: Mapping[str, torch.Tensor] = (
            self._model.state_dict() if self._adapter is None else self._adapter.state_dict()
        )
        return tensors

    def own_saved(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's parts of the tensors that are saved."""
        if self._layout is None:
            return self._saved_tensors()
        if self._saved is None:
            self._saved = self._saved_shards(self._layout)
        return {name: shard.values for name, shard in self._saved[0].items()}

    def _saved_shards(self, layout: RankLayout) -> tuple[dict[str, LocalShard], dict[str, str]]:
        """Return what this rank sends of the saved tensors, tied ones once, and a map from every saved name to
        the first name of its tensor."""
        tensors, first = self._saved_tensors(), dict[int, str]()
        names = {
            name: first.setdefault(local_values(tensor).data_ptr() or id(tensor), name)
            for name, tensor in tensors.items()
        }
        sent = set(names.values())
        return own_shards({name: tensor for name, tensor in tensors.items() if name in sent}, layout), names
