"""What the vLLM engine refuses before it asks its server, each with a sentence."""

from collections.abc import Collection

from penstock.errors import RequestRefused
from penstock.types import GenerateRequest


def check_request(
    request: GenerateRequest,
    *,
    policies: Collection[str],
    vocab_size: int,
    max_context: int,
    is_known: bool,
) -> None:
    """Raise `RequestRefused` for a request that can never be served."""
    num_prompt = len(request.token_ids)
    served = " and ".join(map(repr, policies))
    rules = (
        (not is_known, "its id is in use by a request that is still running"),
        (request.policy in policies, f"this engine serves policy {served}, got {request.policy!r}"),
        (request.num_prompt > 0, "its prompt is empty; give at least one token"),
        (
            num_prompt < max_context,
            f"its prompt has {num_prompt} tokens and the context holds {max_context}, output included",
        ),
        (
            num_prompt == 0 or (request.token_ids.min() >= 0 and request.token_ids.max() < vocab_size),
            f"its token ids must be in 0..{vocab_size - 1}",
        ),
        (not request.record_sampling_mask, "vLLM records no sampling masks here; use engine.kind=embedded"),
        (request.chunk_tokens >= 1, f"chunk_tokens must be >= 1, got {request.chunk_tokens}"),
    )
    for holds, reason in rules:
        if not holds:
            raise RequestRefused(f"request {request.id!r} was refused: {reason}")
