"""From a task to a group: G episodes at once, each made by a workflow that asks an agent for turns.

A workflow decides what an episode is (a single answer now; tool loops and several agents are further
workflows); the agent turns "this context, please" into tokens from an engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from penstock.interfaces import Engine, Tokenizer
from penstock.types import (
    Chunk,
    Episode,
    FinishReason,
    GenerateRequest,
    Group,
    SamplingParams,
    Task,
    Turn,
    group_scope,
)


class Agent(Protocol):
    """Generates one turn from a context."""

    async def turn(self, prompt_ids: Sequence[int]) -> Turn: ...


class Workflow(Protocol):
    """One attempt at a task."""

    async def run(self, task: Task, prompt_ids: Sequence[int], agent: Agent) -> Episode: ...


class SingleTurn:
    """The simplest workflow: the prompt goes in, one answer comes out."""

    async def run(self, task: Task, prompt_ids: Sequence[int], agent: Agent) -> Episode:
        return Episode(task_id=task.id, turns=(await agent.turn(prompt_ids),))


class RolloutRunner:
    """Runs groups against an engine. Holds no state between groups."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingParams,
        group_size: int,
        workflow: Workflow | None = None,
        chunk_tokens: int = 32,
        label: str = "g",
        records: bool = True,
    ) -> None:
        """`records`: whether what the trainer needs is recorded; an evaluation does without."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._group_size = group_size
        self._workflow: Workflow = workflow or SingleTurn()
        self._chunk_tokens = chunk_tokens
        self._label = label
        self._records = records

    async def run_group(
        self, number: int, task: Task, *, ended: Callable[[Episode], None] = lambda episode: None
    ) -> Group:
        """All episodes of one group. The first failure cancels the others and is raised as itself.
        `ended` is told of each episode as it ends."""

        async def run(index: int) -> Episode:
            episode = await self._workflow.run(task, prompt_ids, self._agent(number, index))
            episode = msgspec.structs.replace(episode, index=index)
            ended(episode)
            return episode

        prompt_ids = self._tokenizer.encode_prompt(task.prompt)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(index)) for index in range(self._group_size)]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return Group(number=number, task=task, episodes=tuple(one.result() for one in running))

    def _agent(self, number: int, index: int) -> "EngineAgent":
        return EngineAgent(
            self._engine,
            self._tokenizer,
            name=f"{self._label}{number}.{index}",
            priority=number,
            sampling=_seeded(self._sampling, number, index),
            chunk_tokens=self._chunk_tokens,
            records=self._records,
            blob_scope=group_scope(number),
        )


class EngineAgent:
    """An agent whose turns come from an engine. Where truncation cuts the distribution, what was kept is
    recorded too: without it the trainer's ratios would be biased."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        name: str,
        priority: int,
        sampling: SamplingParams,
        chunk_tokens: int,
        records: bool,
        blob_scope: str,
    ) -> None:
        self._records = records
        self._blob_scope = blob_scope
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name
        self._priority = priority
        self._sampling = sampling
        self._chunk_tokens = chunk_tokens
        self._num_turns = 0

    async def turn(self, prompt_ids: Sequence[int]) -> Turn:
        context = np.asarray(prompt_ids, dtype=np.int32)
        request = GenerateRequest(
            id=f"{self._name}.{self._num_turns}",
            token_ids=context,
            sampling=self._sampling,
            priority=self._priority,
            chunk_tokens=self._chunk_tokens,
            record_sampling_mask=self._records and self._sampling.truncates,
            blob_scope=self._blob_scope,
        )
        self._num_turns += 1
        chunks = [chunk async for chunk in self._engine.generate(request)]
        output_ids = np.concatenate([chunk.token_ids for chunk in chunks])
        return Turn(
            prompt_ids=context,
            output_ids=output_ids,
            logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
            versions=np.concatenate([chunk.versions for chunk in chunks]),
            finish_reason=_finish_reason(chunks),
            sampling=self._sampling,
            text=self._tokenizer.decode(output_ids.tolist()),
            sampling_masks=tuple(c.sampling_mask for c in chunks if c.sampling_mask is not None),
        )


def _finish_reason(chunks: Sequence[Chunk]) -> FinishReason:
    reason = chunks[-1].finish_reason if chunks else None
    if reason is None:
        raise RuntimeError("an engine ended a generation without a finish reason")
    return reason


def _seeded(sampling: SamplingParams, number: int, index: int) -> SamplingParams:
    """A seed of its own for every episode, when the run has one."""
    if sampling.seed is None:
        return sampling
    mixed = np.random.SeedSequence([sampling.seed, number % 2**32, index]).generate_state(1, dtype=np.uint32)
    return msgspec.structs.replace(sampling, seed=int(mixed[0]))
