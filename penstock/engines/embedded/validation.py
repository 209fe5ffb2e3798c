"""What the engine refuses before it spends anything on a request, each with a sentence."""

from collections.abc import Collection

from penstock.errors import RequestRefused
from penstock.types import GenerateRequest


def check_request(
    request: GenerateRequest,
    *,
    policies: Collection[str],
    vocab_size: int,
    max_context: int,
    cache_tokens: int,
    has_tokenizer: bool,
    is_known: bool,
) -> None:
    """Raise `RequestRefused` for a request that can never be served."""
    num_prompt = len(request.token_ids)
    most = min(request.num_prompt + request.sampling.max_tokens, max_context)
    ids = (*request.sampling.stop_token_ids, *request.sampling.logit_bias)
    rules = (
        (not is_known, "its id is in use by a request that is still running"),
        (
            request.policy in policies,
            f"this engine serves policy {' and '.join(map(repr, policies))}, got {request.policy!r}",
        ),
        (request.num_prompt > 0, "its prompt is empty; give at least one token"),
        (
            num_prompt < max_context,
            f"its prompt has {num_prompt} tokens and the context holds {max_context}, output included",
        ),
        (
            most <= cache_tokens,
            f"it may grow to {most} tokens and the cache holds {cache_tokens}; "
            "raise engine.embedded.kv_tokens or lower max_tokens",
        ),
        (
            num_prompt == 0 or (request.token_ids.min() >= 0 and request.token_ids.max() < vocab_size),
            f"its token ids must be in 0..{vocab_size - 1}",
        ),
        (all(0 <= token < vocab_size for token in ids), f"stop and bias ids must be in 0..{vocab_size - 1}"),
        (not request.sampling.stop or has_tokenizer, "stop strings need an engine with a tokenizer"),
        (
            0 <= request.routing_start <= num_prompt,
            f"routing_start must be in 0..{num_prompt}, its prompt's length, got {request.routing_start}",
        ),
        (request.chunk_tokens >= 1, f"chunk_tokens must be >= 1, got {request.chunk_tokens}"),
    )
    for holds, reason in rules:
        if not holds:
            raise RequestRefused(f"request {request.id!r} was refused: {reason}")
