"""Wraps a causal LM as the trainer uses it: packed rows in, logprobs of their loss tokens out."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from penstock.errors import UserError
from penstock.models import attention
from penstock.models.attention import AttentionBackend
from penstock.models.attention_probe import check_attention
from penstock.models.routing import Recording, Replay, Routers, find_routers, unwatch
from penstock.models.transfer import upload
from penstock.records import Sample, SamplingParams, TrainSequence
from penstock.trainer.forward.checkpointing import (
    Checkpointing,
    compile_layers,
    compiler_settings,
    enable_checkpointing,
)
from penstock.trainer.forward.logprob_head import TokenHead, states_dtype
from penstock.trainer.forward.packed_attention import PackedAttention
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.forward.shared_prefixes import gather
from penstock.trainer.forward.value_head import ValueHead

log = logging.getLogger(__name__)

WITHIN = "penstock_within"
"""The name of a split model's method that calls a function while the weights outside its layers are gathered."""
SHARED = 9
"""The number of tokens that the two sequences of the attention check share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Holds what a forward pass returns for every loss token of a row."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None
    routing: torch.Tensor | None = None
    """If routes are replayed, the numbers of (layer, token) choices: that would have flipped, in all, replayed."""


class RowSplit(Protocol):
    """Shares a row among the ranks of a context (`penstock.trainer.parallel.split_sequences`)."""

    @property
    def size(self) -> int: ...

    def own(self, row: PackedRow) -> Any:
        """Return the part of a row that this rank runs."""

    def joined(
        self, own: Any, row: PackedRow, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Join the outputs of all ranks into those of the whole row."""


class PackedModel:
    """Runs packed rows through a Hugging Face causal LM, the chunked head and, for PPO, a value head.

    Dropout stays off: logprobs must be those of the policy that acts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int,
        checkpointing: Checkpointing = "off",
        compiled: bool = False,
        value_head: ValueHead | None = None,
        replays_routing: bool = True,
    ) -> None:
        """Without `replays_routing`, routers choose anew even for rows that have recorded experts."""
        attention.register()
        causal_lm: Any = model
        causal_lm.set_attn_implementation(attention.IMPLEMENTATION)
        self._attention = PackedAttention()
        attention.attach(model, self._attention)
        unwatch(model)
        model.eval()
        enable_checkpointing(model, checkpointing)
        self._context: RowSplit | None = None
        self._value_head = value_head
        self._head = TokenHead(model, chunk_tokens=chunk_tokens)
        self._device = next(model.parameters()).device
        self._packs = True
        self._shares = True
        self._verify(type(model).__name__, causal_lm.get_input_embeddings().num_embeddings)
        self._routers, self._no_routers = self._find_routers(model) if replays_routing else (None, "")
        self._replays = replays_routing
        if value_head is not None and self._head.uses_full_logits:
            raise ValueError(
                f"a value head needs hidden states, and {type(model).__name__} gives only logits; "
                "use an advantage without a value head"
            )
        self._compiled = compiled
        if compiled:
            compile_layers(model)
        self._model = model

    @property
    def model(self) -> Any:
        return self._model

    def split(self, split: Callable[[nn.Module], None], device: str) -> None:
        """Split the model over ranks, in place. It was verified as a whole before."""
        split(self._model)
        self._device = torch.device(device)

    def split_rows(self, context: "RowSplit", wrap: Callable[[AttentionBackend], AttentionBackend]) -> None:
        """Run only this rank's part of every row from now on, with the attention that `wrap` returns."""
        if not self._packs or self._head.uses_full_logits:
            name = type(self._model).__name__
            raise UserError(
                f"the tokens of a sequence of {name} can't be split; set trainer.parallel.context=1"
            )
        self._context = context
        attention.attach(self._model, wrap(self._attention))

    @property
    def shares_prefixes(self) -> bool:
        """Return whether a row may hold a prefix only once for several sequences."""
        return self._shares

    @property
    def routers(self) -> Routers | None:
        """Return the routers of a mixture-of-experts model; None if there are none, or their choices can't be
        replayed."""
        return self._routers

    def __call__(self, row: PackedRow, *, replays_routing: bool = True) -> TokenOutputs:
        """Run a row. Its backward must come before the next row, because layers that are recomputed in backward
        replay the routes of the last row."""
        replay = self._begin_replay(row) if replays_routing else None
        if self._routers is not None:
            self._routers.choices = replay
        outputs = self._outputs(row)
        if replay is None or row.routing is None:
            return outputs
        counts = np.array([row.routing.num_choices, row.routing.num_replayed])
        routing = torch.cat([replay.num_flipped[None], upload(counts, self._device)])
        return replace(outputs, routing=routing)

    def _begin_replay(self, row: PackedRow) -> Replay | None:
        if row.routing is None or not self._replays:
            return None
        self.require_routers().watch()
        return row.routing.replay()

    def require_routers(self) -> Routers:
        """Return the routers, or raise an error that says why their choices can't be replayed."""
        if self._routers is None:
            raise UserError(self._no_routers or "routes were recorded, and the trained model has no experts")
        return self._routers

    @torch.no_grad()
    def chosen(self, row: PackedRow) -> torch.Tensor:
        """Return (layers, tokens, k): the experts that the routers choose for a row now."""
        routers = self.require_routers()
        routers.watch()
        recording = Recording(routers.shape.num_layers)
        with routers.observed_by(recording):
            self._outputs(row)
        return torch.stack([ids for ids in recording.ids if ids is not None])

    def expect_routes(self) -> None:
        """Intercept the routers from now on, so that layers compiled for rows with recorded routes also serve rows
        without."""
        if self._routers is not None:
            self._routers.watch()

    def _outputs(self, row: PackedRow) -> TokenOutputs:
        logprobs, entropy, values = within(self._model)(self._compute, row)
        return TokenOutputs(logprobs=logprobs, entropy=entropy, values=values)

    def _compute(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run one row. The result is a plain tuple of tensors: in no other form do a split model's hooks find
        outputs that need a gradient."""
        own = row if self._context is None else self._context.own(row)
        with compiler_settings() if self._compiled else nullcontext():
            states = self._states(own.input_ids, own.position_ids, own.lengths, own.members)
        states = gather(states, own.rows) if row.num_shared_tokens else states.index_select(0, own.rows)
        logprobs, entropy = self._head(states, own.targets, own.temperature, own.kept)
        # Cloned, because a split model could lose its hooks on a view.
        values = None if self._value_head is None else self._value_head(states).clone()
        if self._context is None:
            return logprobs, entropy, values
        return self._context.joined(own, row, (logprobs, entropy, values))

    @torch.no_grad()
    def _find_routers(self, model: nn.Module) -> tuple[Routers | None, str]:
        """Return the routers, or why none can be replayed; the reason matters only if routes were recorded."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._attention.set_single()
        try:
            routers = find_routers(model, lambda: self._head.states(one, one))
        except UserError as error:
            return None, str(error)
        if routers is not None and not self._packs:
            name = type(model).__name__
            return (
                None,
                f"{name} can't be packed, so its experts can't be replayed; set engine.record_routing=off",
            )
        return routers, ""

    def _states(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: Sequence[int],
        members: Sequence[int] = (),
    ) -> torch.Tensor:
        num_ranks = 1 if self._context is None else self._context.size
        if input_ids.shape[1] * num_ranks != sum(lengths):  # compiled layers do not look at lengths
            raise ValueError(f"a row of {input_ids.shape[1]} tokens can't have lengths {list(lengths)}")
        if self._packs:
            self._attention.set_lengths(lengths, self._device, members)
            return self._head.states(input_ids, position_ids)
        assert not members
        self._attention.set_single()
        ids, positions = (torch.split(row, list(lengths), dim=1) for row in (input_ids, position_ids))
        return torch.cat([self._head.states(*piece) for piece in zip(ids, positions, strict=True)])

    @torch.no_grad()
    def _verify(self, name: str, vocabulary: int) -> None:
        """Check on a few tokens that the head gives the model's logits, that packed sequences do not see each
        other, and that a sequence is the same behind a shared prefix. A model whose layers have a state of
        their own (convolutions, state-space models), or whose attention is outside of transformers'
        interface, fails the check. Its sequences run one at a time."""
        ids = torch.arange(7, device=self._device)[None] % vocabulary
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=self._device)
        self._attention.set_single()
        self._head.verify(ids[:, 3:], positions[:, 3:])
        alone = self._head.states(ids[:, 3:], positions[:, 3:]).float()
        packed = self._states(ids, positions, [3, 4])[3:].float()
        self._packs = self._agree(packed, alone)
        if not self._packs:
            self._shares = False
            log.warning(
                "%s can't be packed (a sequence changes its neighbour by %.3g): sequences run one at a time, "
                "which is slower",
                name,
                float((packed - alone).abs().max()),
            )
            return
        # Tokens 3 and 4 as a prefix, then 0 1 behind it as one rest and 5 6 as another.
        order, offsets = [3, 4, 0, 1, 5, 6], [0, 1, 2, 3, 2, 3]
        shared = self._states(
            ids[:, order], torch.tensor([offsets], device=self._device), [2, 2, 2], members=[2]
        ).float()
        self._shares = self._agree(torch.cat([shared[:2], shared[4:]]), alone)
        if not self._shares:
            log.warning(
                "%s can't share prompts (a sequence changes by %.3g): every sequence runs with its own",
                name,
                float((torch.cat([shared[:2], shared[4:]]) - alone).abs().max()),
            )

    def _agree(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        tolerance = 1e-4 if states_dtype(self._head.model) == torch.float32 else 5e-2
        return bool((ours - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max())))


def within(model: nn.Module) -> Callable[..., Any]:
    """Return `call`, or for a split model a method that does the same while the weights outside its layers are
    gathered."""
    found: Callable[..., Any] = getattr(model, WITHIN, call)
    return found


def call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def release_gathered(model: nn.Module) -> None:
    """Release the weights that a forward pass without backward has left gathered, before the weights change."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def check_packed_attention(
    config: Any, max_context: int, *, say: Callable[[str], None] = log.warning
) -> None:
    """Refuse a model that packed rows would not compute as its own code does. `say` receives a warning if that
    can't be checked."""
    check_attention(config, max_context=max_context, ours=packed_logprobs, doing="trained", say=say)


def packed_logprobs(twin: nn.Module, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the logprobs of each sequence's tokens after the first, with all sequences in one row."""
    policy = PackedModel(twin, chunk_tokens=64)
    row = PackedRow.of([_whole(sequence, 1, group) for group, sequence in enumerate(sequences)])
    assert row is not None
    found = list(torch.split(policy(row).logprobs, list(row.counts)))
    if policy.shares_prefixes:
        longest = max(range(len(sequences)), key=lambda index: len(sequences[index]))
        found[longest] = _behind_a_shared_prompt(policy, sequences[longest], found[longest])
    return found


def _behind_a_shared_prompt(
    policy: PackedModel, sequence: Sequence[int], alone: torch.Tensor
) -> torch.Tensor:
    """Return the sequence's logprobs, its end computed as one of two sequences that share their beginning."""
    other = [*sequence[:SHARED], *reversed(sequence[SHARED:])]
    pair = [_whole(each, SHARED, 0) for each in (other, sequence)]
    row = PackedRow.of(pair, shared_prompts=True)
    assert row is not None
    ends = torch.split(policy(row).logprobs, list(row.counts))
    at = next(index for index, each in enumerate(row.sequences) if each is pair[1])
    return torch.cat([alone[: SHARED - 1], ends[at]])


def _whole(sequence: Sequence[int], num_prompt: int, group: int) -> TrainSequence:
    size = len(sequence)
    sample = Sample(
        token_ids=np.array(sequence, dtype=np.int32),
        loss_mask=np.arange(size) >= num_prompt,
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        sampling=SamplingParams(),
    )
    return TrainSequence(sample=sample, group=group, episode=0)
