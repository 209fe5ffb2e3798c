"""Aligns everything known of each token of a trained sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.observe.events import TokensEvent

UNKNOWN = 255
"""Value in `clipped` of a token that is not in the loss, or of a loss that does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTrace:
    """Holds aligned arrays over all tokens of a sample, context included. Values that only loss tokens have are
    NaN elsewhere."""

    step: int
    group: int
    episode: int
    sample: int
    """Which sample of the episode."""
    token_ids: npt.NDArray[np.int32]
    texts: list[str]
    versions: npt.NDArray[np.int32]
    """-1 where the policy did not sample."""
    ages: npt.NDArray[np.int32]
    """Steps between the weights that sampled and those that were trained; -1 where the policy did not sample."""
    loss_mask: npt.NDArray[np.bool_]
    engine_logprobs: npt.NDArray[np.float32]
    trainer_logprobs: npt.NDArray[np.float32]
    gaps: npt.NDArray[np.float32]
    """The trainer's logprob minus the engine's."""
    ratios: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    """Weight that corrections gave the token."""
    advantages: npt.NDArray[np.float32]
    clipped: npt.NDArray[np.uint8]
    """1 or 0, or `UNKNOWN`."""

    @property
    def worst(self) -> int | None:
        """Return the index at which engine and trainer differ most; None if no gap is known."""
        sizes = np.abs(self.gaps)
        return int(np.nanargmax(sizes)) if np.isfinite(sizes).any() else None

    @classmethod
    def of(cls, event: TokensEvent, vocabulary: Mapping[int, str]) -> "TokenTrace":
        token_ids = np.frombuffer(event.token_ids, "<i4")
        mask = np.frombuffer(event.loss_mask, np.uint8).astype(np.bool_)
        engine = np.frombuffer(event.logprobs, "<f4")
        versions = np.frombuffer(event.versions, "<i4")

        def spread(data: bytes, kind: Any, otherwise: float) -> npt.NDArray[Any]:
            values = np.frombuffer(data, kind)
            column = np.full(len(token_ids), otherwise, dtype=values.dtype)
            if len(values):
                column[mask] = values
            return column

        gaps = spread(event.gaps, "<f4", np.nan)
        return cls(
            step=event.step,
            group=event.group,
            episode=event.episode,
            sample=event.sample,
            token_ids=token_ids,
            texts=[vocabulary.get(token, f"<{token}>") for token in token_ids.tolist()],
            versions=versions,
            ages=np.frombuffer(event.ages, "<i4"),
            loss_mask=mask,
            engine_logprobs=np.where(versions >= 0, engine, np.float32(np.nan)),
            trainer_logprobs=engine + gaps,
            gaps=gaps,
            ratios=np.exp(gaps),
            weights=spread(event.weights, "<f4", np.nan),
            advantages=spread(event.advantages, "<f4", np.nan),
            clipped=spread(event.clipped, np.uint8, UNKNOWN),
        )
