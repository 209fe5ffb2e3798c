"""Answers on their way to a client: an engine's chunks with their text."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.models.text_stream import TextStream
from penstock.rollout.episode_rollout import TokenSource
from penstock.serve.stop_texts import StopTexts
from penstock.types import FinishReason, GenerateRequest, MaskRef

FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""Our reasons in the words of OpenAI and vLLM."""


@dataclass(slots=True)
class Piece:
    """The next part of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    sampling_mask: MaskRef | None = None

    def add(self, piece: "Piece") -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.finish_reason = piece.finish_reason
        self.sampling_mask = piece.sampling_mask

    @property
    def reason(self) -> str | None:
        return None if self.finish_reason is None else FINISH[self.finish_reason]

    def weight_versions(self, start: int = 0) -> list[dict[str, object]]:
        """vLLM's form: spans of output tokens, counted from the beginning of the answer."""
        spans: list[dict[str, object]] = []
        for at, version in enumerate(self.versions, start):
            if spans and spans[-1]["version"] == str(version):
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": str(version), "start": at, "end": at + 1})
        return spans


async def stream_answer(
    engine: TokenSource, request: GenerateRequest, text: TextStream | None = None, stops: Sequence[str] = ()
) -> AsyncIterator[Piece]:
    """Pieces as they are sampled; without a `text` they have none. Leaving early cancels the request. What was sent
    can't be taken back, so an answer that begins again after its first piece fails."""
    cut = StopTexts(stops)
    has_sent = False
    async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.restarts and has_sent:
                raise PenstockError(
                    "new weights made this answer begin again (abort_retry), and part of it was sent; ask without "
                    "stream, or update with another interrupt"
                )
            is_last = chunk.finish_reason is not None
            token_ids = chunk.token_ids.tolist()
            shown = "" if text is None else cut.push(text.push(token_ids, is_last=is_last), is_last=is_last)
            has_sent = True
            yield Piece(
                shown,
                token_ids,
                chunk.logprobs.tolist(),
                chunk.versions.tolist(),
                chunk.finish_reason,
                chunk.sampling_mask,
            )


async def whole_answer(
    engine: TokenSource, request: GenerateRequest, text: TextStream | None = None, stops: Sequence[str] = ()
) -> Piece:
    """All of an answer, and of one that began again, the last."""
    whole = Piece()
    async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.restarts:
                whole = Piece()
            whole.add(
                Piece(
                    "",
                    chunk.token_ids.tolist(),
                    chunk.logprobs.tolist(),
                    chunk.versions.tolist(),
                    chunk.finish_reason,
                    chunk.sampling_mask,
                )
            )
    if text is not None:
        whole.text = StopTexts(stops).push(text.push(whole.token_ids, is_last=True), is_last=True)
    return whole
