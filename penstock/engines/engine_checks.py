"""Checks requests and updates before an engine spends anything on them, and refuses bad ones with a sentence."""

from collections.abc import Collection, Iterable, Mapping

from penstock.errors import BaseMissing, PenstockError, RequestRefused
from penstock.records import GenerateRequest, Interrupt, WeightUpdate

Rule = tuple[bool, str]
"""Whether the rule holds, and the error message if it does not."""


def check_request(
    request: GenerateRequest,
    *,
    policies: Collection[str],
    vocab_size: int,
    max_context: int,
    is_known: bool,
    records_masks: bool = False,
    further: Iterable[Rule] = (),
) -> None:
    """Raise `RequestRefused` for a request that can never be served. `further` are rules of one kind of engine."""
    num_prompt = len(request.token_ids)
    served = " and ".join(map(repr, policies))
    rules: tuple[Rule, ...] = (
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
        (request.chunk_tokens >= 1, f"chunk_tokens must be >= 1, got {request.chunk_tokens}"),
        (
            records_masks or not request.record_sampling_mask,
            "this engine records no sampling masks; use engine.kind=embedded",
        ),
        *further,
    )
    for holds, reason in rules:
        if not holds:
            raise RequestRefused(f"request {request.id!r} was refused: {reason}")


def embedded_rules(
    request: GenerateRequest, *, vocab_size: int, max_context: int, cache_tokens: int, has_tokenizer: bool
) -> tuple[Rule, ...]:
    """Return the embedded engine's own rules: its cache holds the answer, it knows all token ids, it can find stop
    strings, and recorded routes lie within the prompt."""
    num_prompt = len(request.token_ids)
    most = min(request.num_prompt + request.sampling.max_tokens, max_context)
    ids = (*request.sampling.stop_token_ids, *request.sampling.logit_bias)
    return (
        (
            most <= cache_tokens,
            f"it may grow to {most} tokens and the cache holds {cache_tokens}; "
            "raise engine.embedded.kv_tokens or lower max_tokens",
        ),
        (all(0 <= token < vocab_size for token in ids), f"stop and bias ids must be in 0..{vocab_size - 1}"),
        (not request.sampling.stop or has_tokenizer, "stop strings need an engine with a tokenizer"),
        (
            0 <= request.routing_start <= num_prompt,
            f"routing_start must be in 0..{num_prompt}, its prompt's length, got {request.routing_start}",
        ),
    )


def check_update(
    update: WeightUpdate,
    interrupt: Interrupt,
    *,
    name: str,
    versions: Mapping[str, int],
    interrupts: Collection[Interrupt],
    base: int | None = None,
    adds_policies: bool = False,
    is_intact: bool = True,
) -> None:
    """Raise `PenstockError` unless the engine `name`, which serves `versions` (one per policy), can take this
    update. Raise `BaseMissing` if a full update would help. `base` is the version of the engine's last full
    weights; None means the version of the policy. With `adds_policies` an adapter may belong to a new policy.
    `is_intact` is False after an update that failed half-way: nothing can build on such weights, and full
    weights of any version replace them."""
    if interrupt not in interrupts:
        raise PenstockError(
            f"{name} can't update with interrupt {interrupt!r}; set sync.interrupt={' or '.join(interrupts)}"
        )
    served = versions.get(update.policy)
    if served is None and not (adds_policies and update.selection == "adapter"):
        policies = ", ".join(map(repr, versions))
        raise PenstockError(f"{name} serves policy {policies}, got an update of {update.policy!r}")
    has_weights = is_intact or update.base is not None
    if served is not None and has_weights and update.version <= served:
        raise PenstockError(f"{name} serves version {served}, got an update to {update.version}")
    below = served if base is None else base
    if update.base is not None and not (is_intact and update.base == below):
        has = f"serves version {below}" if is_intact else "has weights of no version"
        kind = "an adapter for" if update.selection == "adapter" else "what has changed since"
        raise BaseMissing(
            f"{name} {has}, got an update to {update.version} that holds only {kind} version {update.base}; "
            "send it a full one"
        )
