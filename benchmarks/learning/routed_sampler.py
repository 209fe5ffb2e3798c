"""A sampler whose routers err on purpose, and that writes down which experts they chose.

Near ties between experts fall one way in the engine and another way in the trainer, since both round differently.
Here that is imposed: noise on the scores decides the choice, and the weights of the chosen experts come from the
scores without it. So a trainer that replays the choice computes the very logprobs that were sampled with. One that
does not has other experts for some tokens, whatever its precision.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.learning.token_sampler import Sampler
from penstock.models.routing import Routers, find_routers
from penstock.records import Episode, Group, Task, group_scope
from penstock.records.interfaces import BlobStore
from penstock.records.routing_records import Routes, id_dtype, store_routes


class NoisyChoices:
    """Chooses by noisy logits, of gates as Qwen3-MoE has them; `ids` has what it said."""

    def __init__(self, gates: Sequence[nn.Module], *, noise: float, generator: torch.Generator) -> None:
        self.ids: list[torch.Tensor] = [torch.empty(0)] * len(gates)
        self._noise, self._generator = noise, generator
        for layer, gate in enumerate(gates):
            gate.register_forward_pre_hook(partial(self._look, layer))

    def choose(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        return self.ids[layer].clone()

    def _look(self, layer: int, gate: Any, args: tuple[torch.Tensor, ...]) -> None:
        """What the gate is about to see decides, before it chooses by itself."""
        states = args[0].reshape(-1, args[0].shape[-1])
        logits = F.linear(states, gate.weight)
        noise = torch.randn(logits.shape, generator=self._generator)
        self.ids[layer] = (logits + self._noise * noise).topk(gate.top_k, dim=1).indices


class RoutedSampler(Sampler):
    """Samples with noisy routers. With `blobs` it stores their choices there and its turns refer to them."""

    def __init__(self, *args: Any, noise: float, blobs: BlobStore | None, seed: int, **settings: Any) -> None:
        super().__init__(*args, seed=seed, **settings)
        one = torch.zeros(1, 1, dtype=torch.long)
        routers = find_routers(self._model, lambda: self._model(one))
        assert routers is not None, "the model must have experts"
        routers.watch()
        self._routers: Routers = routers
        self._blobs = blobs
        gates = [layer.mlp.gate for layer in self._model.model.layers]
        generator = torch.Generator().manual_seed(seed)
        self._choices = NoisyChoices(gates, noise=noise, generator=generator)
        self._passes: list[Routes] = []
        """Of each forward pass: (rows × tokens, layers, k)."""

    def sample(self, tasks: Sequence[tuple[int, Task]], versions: Sequence[int]) -> list[Group]:
        self._passes = []
        groups = super().sample(tasks, versions)
        if self._blobs is None:
            return groups
        return [self._with_routes(place, group, len(groups)) for place, group in enumerate(groups)]

    def _forward(self, token_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        with self._routers.observed_by(self._choices):
            logits = super()._forward(token_ids, **settings)
        chosen = torch.stack(self._choices.ids, dim=1)
        self._passes.append(chosen.numpy().astype(id_dtype(self._routers.shape)))
        return logits

    def _with_routes(self, place: int, group: Group, num_groups: int) -> Group:
        prompts, *steps = self._passes
        prompt = np.split(prompts, num_groups)[place]
        episodes = []
        for index, episode in enumerate(group.episodes):
            (turn,) = episode.turns
            row = place * self._group_size + index
            # The last token was drawn and never computed.
            outputs = [step[row : row + 1] for step in steps[: len(turn.output_ids) - 1]]
            episodes.append(self._stored(group.number, index, episode, np.concatenate([prompt, *outputs])))
        return msgspec.structs.replace(group, episodes=tuple(episodes))

    def _stored(self, group: int, index: int, episode: Episode, routes: Routes) -> Episode:
        assert self._blobs is not None
        key = f"{group_scope(group)}/{index}.routes"
        ref = store_routes(self._blobs, key, routes, self._routers.shape, start=0)
        (turn,) = episode.turns
        return msgspec.structs.replace(episode, turns=(msgspec.structs.replace(turn, routing=(ref,)),))
