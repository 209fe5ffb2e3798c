"""Tracks one request on its way through the engine: its tokens, and how many of them are in the cache."""

from dataclasses import dataclass, field

from penstock.engines.embedded.blocks import ROOT
from penstock.records import NOT_SAMPLED, GenerateRequest
from penstock.records.routing_records import Routes
from penstock.records.sampling_masks import Packed


@dataclass(slots=True, eq=False)
class Sequence:
    """Holds the tokens of one request. `tokens[:num_computed]` have keys and values in `blocks`; the rest waits
    for a forward pass. Pending tokens count as computed, except the newest."""

    request: GenerateRequest
    arrival: int
    limit: int
    """Number of tokens, prompt and output, at which it ends with `length`."""
    seed: int
    tokens: list[int]
    num_prompt: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    """For each output token, whether keys and values of older weights were read when it was drawn."""
    masks: list[Packed] = field(default_factory=list)
    """Kept ids of the output tokens, until they are stored together when the request ends."""
    routes: Routes | None = None
    """Experts with which its first tokens are computed again after they lost their blocks. Those of later tokens
    are beside its blocks."""
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    node: int = ROOT
    """Trie node of the last block that was entered into the prefix index."""
    num_indexed: int = 0
    """Blocks entered into the prefix index, or taken from it."""
    kv_version: int | None = None
    """Its policy's version when its oldest keys and values were computed; None while it has none."""
    leader: "Sequence | None" = None
    """The sequence with the same prompt that computes it for this one too."""
    followers: list["Sequence"] = field(default_factory=list)
    is_running: bool = False
    num_preempted: int = 0
    num_pending: int = 0
    """Tokens that a device has drawn, or is about to draw, and that the host has not read."""
    num_sent: int = 0
    """Output tokens that were sent in chunks, or came with the request."""
    num_recorded: int = 0
    """Output tokens whose recorded data was stored, or was stored before this request."""
    num_routed: int = 0
    """Tokens whose routes were stored, or were known before this request; prompt tokens count too."""
    restarts: bool = False
    """Chunks that were sent are void; the next one says so."""

    @property
    def order(self) -> tuple[int, int]:
        """Return the scheduling order: the smaller priority goes first, then the earlier arrival."""
        return (self.request.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def restart(self) -> None:
        """Throw the output away. The seed stays, so the same weights would give the same tokens again."""
        del self.tokens[self.num_prompt :]
        self.logprobs, self.versions, self.mixed, self.masks = [], [], [], []
        self.routes = None
        self.restarts = self.restarts or self.num_sent > 0
        self.num_sent = self.num_recorded = 0
        self.request = self.request.from_beginning()
        self.num_routed = self.request.routing_start

    @property
    def policy(self) -> str:
        return self.request.policy

    @property
    def prompt_key(self) -> tuple[str, bytes]:
        """Return a key that is equal for requests that can share one prefill: same policy, same prompt."""
        return (self.policy, self.request.token_ids[: self.num_prompt].tobytes())


def sequence_of(request: GenerateRequest, *, arrival: int, max_context: int, seed: int) -> Sequence:
    """Turn a request into a sequence of which nothing is computed yet. Of resumed output only the tokens are known,
    and only they are needed."""
    num_resumed = request.num_resumed
    return Sequence(
        request=request,
        arrival=arrival,
        limit=min(request.num_prompt + request.sampling.max_tokens, max_context),
        seed=seed,
        tokens=request.token_ids.tolist(),
        num_prompt=request.num_prompt,
        logprobs=[0.0] * num_resumed,
        versions=[NOT_SAMPLED] * num_resumed,
        mixed=[False] * num_resumed,
        num_sent=num_resumed,
        num_recorded=num_resumed,
        num_routed=request.routing_start,
    )
