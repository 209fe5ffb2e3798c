"""The arms of the learning experiment: what each trains with, and how old its samples are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.algorithms.config import AlgorithmConfig
from penstock.loop.admission import Late

LAGS = (0, 1, 4, 8, 16)

NONE: Mapping[str, Any] = {
    "loss": "cispo",
    "loss_args": {"ratio_floor": 1.0, "ratio_cap": 1.0},
    "corrections": {},
}
"""No correction: L = −A log π. The importance weight is 1 whatever the ratio, and nothing is clipped or
masked. On-policy, its gradient is that of every other loss here."""

TIS: Mapping[str, Any] = {"loss": "tis_reinforce", "loss_args": {"cap": 2.0}, "corrections": {}}
"""Truncated importance sampling per token, and nothing else: L = −sg(min(π/π_behaviour, 2)) A log π."""

LORA: Mapping[str, Any] = {
    "rank": 8,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
}
"""The output embedding is among them, since that is where this tiny model keeps its unsureness: with all weights of
the other linear layers trained in full, the area is 0.67 of full fine-tuning's, and 0.74 with adapters on them."""
LORA_LEARNING_RATE = 2e-3
"""Of 1e-3, 2e-3 and 4e-3, in a run each of a seed that the arm does not have (100), the steadiest: areas were 0.95,
1.18 and 1.25 of full fine-tuning's, but the last one's curve fell back several times. Adapters need a higher rate
than full fine-tuning, whose 4e-4 was chosen for this task too."""

ROUTER_NOISE: Mapping[str, float] = {"tenth": 0.2, "half": 1.0}
"""Deviation of the noise on the logits by which a sampler's routers choose, named by the share of choices that it
flips in the built-in mixture. A tenth is what others have published of real models; half is an extreme."""

METHODS: Mapping[str, Mapping[str, Any]] = {"default": {}, "none": NONE, "tis": TIS}
"""Method to `algorithm` section. `default` is the library's."""
TITLES: Mapping[str, str] = {
    "default": "default correction",
    "none": "no correction",
    "tis": "truncated importance sampling",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all arms share: one task, one model, one set of hyper-parameters, one sample budget."""

    model: str
    steps: int = 100
    groups: int = 16
    group_size: int = 8
    max_new_tokens: int = 5
    learning_rate: float = 4e-4
    warmup_steps: int = 10
    max_grad_norm: float = 0.3
    schedule: str = "constant"
    eval_every: int = 5
    num_tasks: int = 4000
    num_heldout: int = 256
    target: float = 0.9
    """The held-out reward up to whose first crossing by the synchronous run areas are taken."""

    @property
    def samples_per_step(self) -> int:
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRouters:
    """How a sampler's routers choose, and what the trainer does about it."""

    noise: float
    """Deviation of the noise on their logits; 0 chooses as the trainer does."""
    replays: bool
    """Whether the trainer computes with the experts that sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A method at an imposed lag, or a lateness policy under stragglers."""

    name: str
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    lag: int = 0
    late: Late | None = None
    """Set: stragglers and the staleness gate decide the ages, and `lag` is its bound."""
    lora: Mapping[str, Any] | None = None
    """Set: an adapter with these settings is trained, and not all weights."""
    learning_rate: float | None = None
    """None: that of the setup."""
    routers: SamplerRouters | None = None
    """Set: the model has experts, and these routers choose among them when it samples."""

    def config(self) -> AlgorithmConfig:
        return AlgorithmConfig.model_validate(dict(self.algorithm))


ROUTING_BASELINE = "routing/agreeing"
ROUTING: Mapping[str, SamplerRouters] = {
    ROUTING_BASELINE: SamplerRouters(noise=0.0, replays=False),
    **{
        f"routing/{share}/{name}": SamplerRouters(noise=noise, replays=name == "replayed")
        for share, noise in ROUTER_NOISE.items()
        for name in ("replayed", "free")
    },
}
"""Routers that choose as the trainer's do, and routers that err, with their choices replayed in training or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run of one arm: held-out reward against trained samples, and what was measured meanwhile."""

    arm: str
    seed: int
    samples: list[int]
    ticks: list[int]
    """Units of time (one training step or wait each) when each reward was measured."""
    rewards: list[float]
    staleness_mean: float
    staleness_max: float
    ess_mean: float
    ess_min: float
    kl_mean: float
    clip_fraction: float
    masked_fraction: float
    logprob_gap_max: float
    """Sampler against trainer on tokens of the current version; NaN where there is none."""
    drops: dict[str, int] = field(default_factory=dict)
    routing: dict[str, float] = field(default_factory=dict)
    """Means of the metrics of replayed experts."""
    seconds: float = 0.0
