"""A lean sampler for equally long prompts, whose weights may be of any kept version at any token.

The learning experiment imposes staleness instead of waiting for it: each token is sampled with the weights
that the schedule names, and what the trainer sees is what an engine would have recorded.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from penstock.models.published import published_tensors
from penstock.records import Episode, Group, SamplingParams, Task, Turn

Weights = dict[str, torch.Tensor]


class Snapshots:
    """The weights of the last `keep` versions."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._versions: OrderedDict[int, Weights] = OrderedDict()

    def add(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._versions[version] = {name: tensor.clone() for name, tensor in weights.items()}
        while len(self._versions) > self._keep:
            self._versions.popitem(last=False)

    def __getitem__(self, version: int) -> Weights:
        return self._versions[version]


@dataclass(frozen=True, slots=True)
class Answers:
    """Prompts with their right answers and an end, as (tasks, tokens); answers begin at `start`."""

    rows: torch.Tensor
    start: int

    @classmethod
    def of(cls, tasks: Sequence[Task], tokenizer: Any) -> "Answers":
        encode, end = tokenizer.encode_prompt, tokenizer.stop_token_ids[0]
        rows = [[*encode(task.prompt), *encode(task.columns["answer"]), end] for task in tasks]
        return cls(torch.tensor(rows), len(encode(tasks[0].prompt)))


class Sampler:
    """Samples whole groups at temperature 1, all prompts in one batch; a group's noise depends on the
    seed and its number alone, so that arms of an experiment are paired."""

    def __init__(
        self,
        model: nn.Module,
        snapshots: Snapshots,
        *,
        group_size: int,
        sampling: SamplingParams,
        tokenizer: Any,
        seed: int,
        tensors: Callable[[nn.Module], Weights] = published_tensors,
    ) -> None:
        """`tensors` are those of a model that snapshots hold."""
        own: Any = copy.deepcopy(model)
        own.set_attn_implementation("sdpa")
        self._model = own.eval()
        self._tensors = tensors(own)
        self._snapshots = snapshots
        self._group_size = group_size
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._seed = seed
        self._loaded: int | None = None

    def sample(self, tasks: Sequence[tuple[int, Task]], versions: Sequence[int]) -> list[Group]:
        """A group for each (number, task). `versions[k]` is that of the weights which sample token k: they
        are swapped between two forward passes, and the KV cache is kept."""
        prompts = torch.tensor([self._tokenizer.encode_prompt(task.prompt) for _, task in tasks])
        noise = np.concatenate([self._noise(number) for number, _ in tasks])
        tokens, logprobs = self._decode(prompts, torch.from_numpy(noise), versions)
        rows = iter(zip(tokens.numpy(), logprobs.numpy(), strict=True))
        groups = []
        for (number, task), prompt in zip(tasks, prompts.numpy().astype(np.int32), strict=True):
            turns = [self._turn(prompt, *next(rows), versions) for _ in range(self._group_size)]
            episodes = tuple(Episode(task_id=task.id, turns=(turn,)) for turn in turns)
            groups.append(Group(number=number, task=task, episodes=episodes))
        return groups

    @torch.no_grad()
    def exact_reward(self, answers: "Answers", version: int) -> float:
        """The expected reward of sampling once per task: the mean probability of exactly the answer and the
        end. No samples, no noise."""
        self._load(version)
        logits = self._model(answers.rows[:, :-1]).logits[:, answers.start - 1 :]
        taken = logits.log_softmax(-1).gather(2, answers.rows[:, answers.start :, None])[..., 0]
        return float(taken.sum(1).exp().mean())

    @torch.no_grad()
    def _decode(
        self, prompts: torch.Tensor, noise: torch.Tensor, versions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, max tokens) of tokens and logprobs; what follows an end is of no use."""
        cache = DynamicCache()
        self._load(versions[0])
        logits = self._forward(prompts, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(self._group_size)
        logits = logits.repeat_interleave(self._group_size, dim=0)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        ends = torch.tensor(self._sampling.stop_token_ids)
        running = torch.ones(len(logits), dtype=torch.bool)
        for index in range(self._sampling.max_tokens):
            if index and bool(running.any()):
                self._load(versions[index])
                logits = self._forward(tokens[-1][:, None], past_key_values=cache)
            distribution = logits.log_softmax(-1)
            chosen = draw(distribution, noise[:, index])
            tokens.append(chosen)
            logprobs.append(distribution.gather(1, chosen[:, None])[:, 0])
            running &= ~torch.isin(chosen, ends)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def _forward(self, token_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        """Logits after the last token of every row."""
        logits: torch.Tensor = self._model(token_ids, use_cache=True, **settings).logits[:, -1]
        return logits

    def _turn(
        self, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, versions: Sequence[int]
    ) -> Turn:
        ends = np.flatnonzero(np.isin(tokens, self._sampling.stop_token_ids))
        length = int(ends[0]) + 1 if ends.size else len(tokens)
        return Turn(
            prompt_ids=prompt,
            output_ids=tokens[:length].astype(np.int32),
            logprobs=logprobs[:length].astype(np.float32),
            versions=np.array(versions[:length], dtype=np.int32),
            finish_reason="stop" if ends.size else "length",
            sampling=self._sampling,
            text=self._tokenizer.decode(tokens[:length].tolist()),
        )

    def _noise(self, number: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, number))
        return rng.random((self._group_size, self._sampling.max_tokens))

    def _load(self, version: int) -> None:
        if version == self._loaded:
            return
        with torch.no_grad():
            for name, tensor in self._snapshots[version].items():
                self._tensors[name].copy_(tensor)
        self._loaded = version


def draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row by the inverse of the cumulative distribution."""
    cumulative = logprobs.double().exp().cumsum(-1)
    position = (cumulative < uniform[:, None] * cumulative[:, -1:]).sum(-1)
    return position.clamp(max=logprobs.shape[-1] - 1)
