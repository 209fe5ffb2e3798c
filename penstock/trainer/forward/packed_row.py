"""Builds one micro-batch as tensors: a packed row for the model, and flat columns over its loss tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.blob_stores import MemoryBlobs
from penstock.records import FloatArray, IntArray, RoutingShape, Sample, TrainSequence
from penstock.records.interfaces import BlobStore
from penstock.records.sampling_masks import fetch_mask, kept_ids
from penstock.trainer.forward.logprob_head import KeptIds
from penstock.trainer.forward.row_routing import RowRouting, SampleRoutes
from penstock.trainer.step.sharing import RowLayout, loss_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Holds sequences side by side in a (1, tokens) row, and the loss tokens that it predicts.

    A sequence is cut after the last position that predicts a loss token, since what follows can't matter. A prefix
    that sequences of a group share may be in the row once; its last token then predicts the first one of each.
    """

    sequences: tuple[TrainSequence, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    """Lengths of the segments that attention keeps apart: whole sequences, or shared prefixes and their rests."""
    rows: torch.Tensor
    """(loss tokens,): the position in the row whose hidden state predicts each."""
    targets: torch.Tensor
    temperature: torch.Tensor
    behaviour_logprobs: torch.Tensor
    segments: torch.Tensor
    counts: tuple[int, ...]
    """Loss tokens of each sequence."""
    positions: tuple[IntArray, ...]
    """Positions of the loss tokens in each sample."""
    kept: KeptIds | None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """(loss tokens,) each, by name; 0 where a sample has none."""
    members: tuple[int, ...] = ()
    """The number of rests of each shared prefix, as `penstock.trainer.forward.shared_prefixes` reads them."""
    num_shared_tokens: int = 0
    """Tokens that sharing left out of the row."""
    routing: RowRouting | None = None
    """The experts that were chosen when the tokens were sampled; None lets routers choose anew."""

    @property
    def num_loss_tokens(self) -> int:
        return int(self.targets.shape[0])

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainSequence],
        device: torch.device | str = "cpu",
        *,
        shared_prompts: bool = False,
        columns: Sequence[str] = (),
        blobs: BlobStore | None = None,
        routing: RoutingShape | None = None,
    ) -> "PackedRow | None":
        """Pack sequences into a row; return None when no sequence has a loss token. `columns` names the step's
        token columns, which every row gets. Recorded sampling masks are read from `blobs`, and so are routes
        if `routing` gives the model's routing shape."""
        positions_of = [loss_positions(sequence.sample) for sequence in sequences]
        chosen = [index for index, positions in enumerate(positions_of) if positions.size]
        if not chosen:
            return None
        samples = [sequences[index].sample for index in chosen]
        positions_of = [positions_of[index] for index in chosen]
        for sample in samples:
            if sample.sampling.temperature <= 0:
                raise ValueError(
                    "a sample drawn at temperature 0 has no distribution to train on; use a temperature > 0"
                )
            if sample.sampling.not_replayed():
                raise ValueError(
                    f"a sample drawn with {', '.join(sample.sampling.not_replayed())} can't be trained on: "
                    "the trainer can't replay it; sample without"
                )
        blobs = blobs or MemoryBlobs()
        records = None if routing is None else [SampleRoutes.of(sample, routing, blobs) for sample in samples]
        marks = None if records is None or not shared_prompts else [record.marks for record in records]
        layout = RowLayout.of([sequences[index] for index in chosen], shared=shared_prompts, marks=marks)
        counts = [len(positions) for positions in positions_of]

        def column(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

        picked = list(zip(samples, positions_of, strict=True))
        return cls(
            sequences=tuple(sequences[index] for index in chosen),
            input_ids=column(
                [samples[part.sequence].token_ids[part.start : part.stop] for part in layout.segments],
                torch.long,
            )[None],
            position_ids=column([np.arange(part.start, part.stop) for part in layout.segments], torch.long)[
                None
            ],
            lengths=tuple(part.stop - part.start for part in layout.segments),
            rows=column(
                [within[p - 1] for p, within in zip(positions_of, layout.positions, strict=True)], torch.long
            ),
            targets=column([s.token_ids[p] for s, p in picked], torch.long),
            temperature=column([np.full(len(p), s.sampling.temperature) for s, p in picked], torch.float32),
            behaviour_logprobs=column([s.logprobs[p] for s, p in picked], torch.float32),
            segments=column([np.full(n, i) for i, n in enumerate(counts)], torch.long),
            counts=tuple(counts),
            positions=tuple(positions_of),
            kept=_kept(picked, device, blobs),
            columns={
                name: column([_values(s, name)[p] for s, p in picked], torch.float32) for name in columns
            },
            members=layout.members,
            num_shared_tokens=layout.num_shared_tokens,
            routing=None if records is None else RowRouting.of(records, layout.segments, device=device),
        )


def _values(sample: Sample, name: str) -> FloatArray:
    values = sample.columns.get(name)
    return np.zeros(len(sample.token_ids), dtype=np.float32) if values is None else values


def _kept(
    picked: list[tuple[Sample, IntArray]], device: torch.device | str, blobs: BlobStore
) -> KeptIds | None:
    """Join the recorded sampling masks of the loss tokens; tokens without one have no ids."""
    if not any(sample.sampling_masks for sample, _ in picked):
        return None
    counts: list[IntArray] = []
    ids: list[IntArray] = [np.zeros(0, dtype=np.int32)]
    for sample, positions in picked:
        counts.append(np.zeros(len(positions), dtype=np.int32))
        for ref in sample.sampling_masks:
            inside = slice(*np.searchsorted(positions, (ref.start, ref.end)))
            counts[-1][inside], found = kept_ids(fetch_mask(blobs, ref), positions[inside] - ref.start)
            ids.append(found)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])
    return KeptIds(
        offsets=torch.from_numpy(offsets),
        ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device),
    )
