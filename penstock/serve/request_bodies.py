"""Defines the bodies of requests, as OpenAI's and vLLM's clients send them.

An unknown field is refused by name, since ignoring an option makes an answer silently wrong. Fields of type
`Any` do not change an answer; they are accepted and ignored (but `features` must be empty).
"""

from typing import Annotated, Any

import msgspec

from penstock.records import SamplingParams
from penstock.serve.api_error import ApiError, unsupported

MAX_CHOICES = 128
SEEDS = 2**64
TOKENS = 2**31
"""Ids are sent to engines as 32-bit numbers; an engine refuses those that its model does not have."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=TOKENS)]
NOT_OF_THE_TEMPLATE = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Parameters of the method that renders a template, rather than variables of the template."""


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Says how tokens are drawn; `None` takes the server's default."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    seed: int | None = None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, *, end_ids: tuple[int, ...], room: int, limit: int | None = None) -> SamplingParams:
        """Return these fields as `SamplingParams`. `end_ids` end an answer unless the request ignores them. The
        longest answer is `limit`, else `max_tokens`, else `room`: the space that is left in the context."""
        if self.frequency_penalty:
            raise unsupported("frequency_penalty", "use presence_penalty or repetition_penalty")
        own = tuple(self.stop_token_ids or ())
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            # vLLM's clients send -1 to switch it off.
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
        }
        asked = limit if limit is not None else self.max_tokens
        try:
            return SamplingParams(
                max_tokens=room if asked is None else asked,
                min_tokens=self.min_tokens,
                stop_token_ids=own if self.ignore_eos else tuple(dict.fromkeys((*own, *end_ids))),
                stop=self.stops(),
                logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
                seed=None if self.seed is None else self.seed % SEEDS,
                **{name: value for name, value in given.items() if value is not None},
            )
        except ValueError as error:
            raise ApiError(str(error)) from error


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False


class TextFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Holds the fields that completions and chat have in common."""

    model: str = ""
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    """Whether to send the ids of prompt and answer beside the text, as vLLM does, and the version of each token."""
    priority: int = 0
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def drawn(self) -> SamplingFields:
        return self

    def limit(self) -> int | None:
        """Return the most tokens that the client wants in an answer, if it sets a limit."""
        return self.max_tokens

    def num_choices(self) -> int:
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MAX_CHOICES:
            raise ApiError(f"n must be between 1 and {MAX_CHOICES}, got {count}", param="n")
        return count

    @property
    def sends_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(TextFields, kw_only=True, forbid_unknown_fields=True):
    """Holds the body of `POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        if self.echo:
            raise unsupported("echo", "prompts are not sent back")
        if self.suffix:
            raise unsupported("suffix", "models continue a text, they do not fill it in")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "every answer that is made is returned; use n")
        if self.logprobs is not None and not 0 <= self.logprobs <= 1:
            raise unsupported("logprobs", "only those of the sampled tokens are kept: use 0 or 1")

    def prompts(self) -> list[str | list[int]]:
        """Return one or several prompts, each as text or as token ids."""
        given = [self.prompt] if isinstance(self.prompt, str) or _are_ids(self.prompt) else self.prompt
        if not given or not all(isinstance(prompt, str) or _are_ids(prompt) for prompt in given):
            raise ApiError(
                f"prompt must be a text, token ids (0 to {TOKENS - 1}), or a list of these", param="prompt"
            )
        return given


def _are_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(type(token) is int and 0 <= token < TOKENS for token in prompt)
    )


class ChatBody(TextFields, kw_only=True, forbid_unknown_fields=True):
    """Holds the body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    modalities: list[str] | None = None

    def check(self) -> None:
        if not self.messages:
            raise ApiError("messages must not be empty", param="messages")
        if self.top_logprobs:
            raise unsupported("top_logprobs", "only those of the sampled tokens are kept: use 0")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise unsupported(
                "response_format", "answers are not constrained; only {'type': 'text'} is known"
            )
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported("modalities", "only text is generated")
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", "the model decides: use 'auto' or 'none'")
        for name in sorted(NOT_OF_THE_TEMPLATE.intersection(self.chat_template_kwargs or ())):
            raise unsupported(f"chat_template_kwargs.{name}", "it is not a variable of a chat template")

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template shows to the model, if any."""
        return None if self.tool_choice == "none" or not self.tools else self.tools


class TokenSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Holds the `sampling_params` of a request in token ids. All tokens are sent with their logprobs."""

    n: int | None = None
    logprobs: int | None = None
    detokenize: Any = None
    skip_special_tokens: Any = None
    output_kind: Any = None
    routed_experts_prompt_start: Any = None
    """Accepted for vLLM's clients; answers carry no routed experts."""


class TokenBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Holds the body of `POST /inference/v1/generate`: vLLM's request in token ids, with our own fields at the
    end."""

    token_ids: list[TokenId]
    sampling_params: TokenSampling = msgspec.field(default_factory=TokenSampling)
    request_id: str | None = None
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: Any = None
    cache_salt: Any = None
    priority: int = 0
    features: Any = None
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens in an event of the stream; unset takes as many as the engine samples at a time."""
    record_sampling_mask: bool = False
    """Whether to send, for each token, the ids that truncation kept."""

    def check(self) -> None:
        sampling = self.sampling_params
        if (sampling.n or 1) != 1:
            raise unsupported("sampling_params.n", "send one request for each answer")
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= 1:
            raise unsupported("sampling_params.logprobs", "only those of the sampled tokens are kept: use 0")
        if self.features:
            raise unsupported("features", "only text is served")

    def drawn(self) -> SamplingFields:
        return self.sampling_params

    def limit(self) -> int | None:
        return self.sampling_params.max_tokens

    def stops(self) -> tuple[str, ...]:
        return self.sampling_params.stops()

    def num_choices(self) -> int:
        return 1

    def prompts(self) -> list[list[int]]:
        return [self.token_ids]


Body = ChatBody | CompletionBody | TokenBody
