"""Checks before a run that our attention computes what the model's own does, on a small random twin of the
model.

The twin runs a few sequences one by one with the attention of its own code, and all together with ours. The
sequences reach past every window, chunk and switch of the rotary embedding that the run's contexts can reach.
A model that disagrees is refused by name: engine and trainer share our attention, so no comparison of the two
would show it. Before training, gradients are compared too.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from penstock.errors import UserError
from penstock.models.small_twin import VOCABULARY, limits_of, small_twin

log = logging.getLogger(__name__)

LENGTHS = (21, 8, 3, 12)
"""The second sequence ends just below the switch of the rotary embedding; the first reaches past it."""
TOLERANCE = 1e-3
"""Relative to the logprobs' standard deviation, or in nats where that is less than one. Rounding errors are a
hundredth of it; those of a different attention are far above it. A parameter's gradient may be off by this share
of the whole gradient's norm, and if it is small, by a tenth of its own: where much cancels, rounding reaches 3 %
of a scalar's gradient (Apertus), and it is far below that elsewhere."""
SEEDS = (0, 1)
"""With one seed, two experts with nearly equal scores may make a difference, so a second seed must differ too."""

OurAttention = Callable[[nn.Module, Sequence[Sequence[int]]], Sequence[torch.Tensor]]
"""Runs a twin over all sequences together. Returns for each sequence the logprobs of its tokens after the first,
NaN for those that were not computed. They carry gradients where those are compared."""


def check_attention(
    config: Any,
    *,
    max_context: int,
    ours: OurAttention,
    doing: Literal["served", "trained"],
    say: Callable[[str], None] = log.warning,
) -> None:
    """Refuse a model if our attention differs from that of its own code, in gradients too if it is trained. `say`
    receives a warning if the two can't be compared."""
    name = type(config).__name__.removesuffix("Config")
    try:
        off = disagreement(config, max_context, ours, doing)
    except UserError:
        raise
    except Exception as error:  # a model class may raise anything for sizes that it was not made for
        first_line = str(error).split("\n")[0]
        say(
            f"the attention of {name} was not compared with its own: no small model could be made from its config "
            f"({type(error).__name__}: {first_line})"
        )
        return
    if off is None:
        return
    reached = [limit for limit in limits_of(config) if limit.tokens < max_context]
    for tokens in sorted({limit.tokens for limit in reached}, reverse=True):
        if disagreement(config, tokens, ours, doing) is None:
            past = " and ".join(str(limit) for limit in reached if limit.tokens == tokens)
            raise UserError(
                f"{name} can't be {doing} with contexts of {max_context} tokens: the model has {past}, and "
                f"past that our attention differs from the model's own ({off} in a small random model of its "
                f"config); set engine.max_context to at most {tokens}"
            )
    raise UserError(
        f"{name} can't be {doing}: our attention differs from the model's own ({off} in a small random model of "
        "its config); choose another model"
    )


def disagreement(
    config: Any, max_context: int, ours: OurAttention, doing: Literal["served", "trained"]
) -> str | None:
    """Return the largest difference in words, or None if it is only rounding."""
    worst = []
    for seed in SEEDS:
        twin = small_twin(config, max_context, seed=seed)
        with torch.set_grad_enabled(doing == "trained"):
            expected = torch.cat([own_logprobs(twin, sequence) for sequence in probe_sequences()])
            gradients = gradients_of(twin, expected) if doing == "trained" else {}
            found = torch.cat(list(ours(twin, probe_sequences())))
        apart = (expected - found).detach().abs()
        compared = apart[~apart.isnan()]
        nats = float(compared.max()) if len(compared) else torch.inf  # nothing at all: it computes NaN
        off = nats / (TOLERANCE * max(1.0, float(expected.detach().std()))), f"off by {nats:.2g} nats"
        if off[0] <= 1 and doing == "trained":
            off = _compare_gradients(gradients, gradients_of(twin, found))
        if off[0] <= 1:
            return None
        worst.append(off)
    return min(worst)[1]


def gradients_of(twin: nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of a weighted sum of the logprobs for every parameter that is trained; zeros where it has
    no part in it."""
    weights = {name: weight for name, weight in twin.named_parameters() if weight.requires_grad}
    total = (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()
    found = torch.autograd.grad(total, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def _compare_gradients(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the largest difference in a parameter's gradient, as a multiple of what it may be, and in words."""
    whole = float(torch.stack([each.norm() for each in expected.values()]).norm())
    differences = []
    for name, each in expected.items():
        size, off = float(each.norm()), float((found[name] - each).norm())
        limit = TOLERANCE * min(whole, 100 * size + whole / 100)
        share = off / size if size else torch.inf
        differences.append((off / limit, f"the gradient of {name} is off by {share:.2g} of its norm"))
    return max(differences)


def probe_sequences() -> list[list[int]]:
    """Return sequences that differ from each other, so that attention across sequences shows, without special
    token 0."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]


def own_logprobs(twin: nn.Module, sequence: Sequence[int]) -> torch.Tensor:
    """Return the logprobs of every token after the first, computed by the model's own code."""
    ids = torch.tensor([list(sequence)])
    logprobs = twin(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    chosen: torch.Tensor = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return chosen
