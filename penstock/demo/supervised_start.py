"""Trains the built-in model's supervised start: problems, a noisy teacher, a short training loop.

The teacher's answers serve as inputs and its digit probabilities as targets. So the model learns from the
distribution that the noisy digits come from: the same lesson with less variance, and so in fewer steps.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from penstock.demo.model import MixtureRecipe, Recipe
from penstock.errors import PenstockError

EOS, UNKNOWN = "<eos>", "<unk>"
VOCABULARY = (*"0123456789", "+", "=", EOS, UNKNOWN)
PLUS, EQUALS, EOS_ID = VOCABULARY.index("+"), VOCABULARY.index("="), VOCABULARY.index(EOS)
NUM_DIGITS = 3


class Batch(NamedTuple):
    """Holds problems with the teacher's answers: B rows of prompt (P tokens) and answer (A tokens)."""

    token_ids_BL: torch.Tensor
    answer_BA: torch.Tensor
    """The right answers, each ended by eos."""
    target_BAV: torch.Tensor
    """The teacher's probability of each token."""


def train_and_save(recipe: Recipe, folder: Path, *, log: Callable[[str], None], threads: int) -> None:
    """Train until the model is as unreliable as the recipe asks, and write model and tokenizer."""
    pairs = training_pairs(recipe)
    with _torch_settings(threads):
        for attempt in range(recipe.attempts):
            model, exact = _train(recipe, pairs, recipe.seed + attempt, log)
            if recipe.min_exact <= exact <= recipe.max_exact:
                save_quietly(model, make_tokenizer(recipe), folder)
                return
            log(f"built-in model: exact with probability {exact:.2f}; trying another seed")
    raise PenstockError(
        f"the built-in model could not be made: after {recipe.attempts} attempts its answers are exact with "
        f"probability {exact:.2f}, which must be in [{recipe.min_exact}, {recipe.max_exact}]"
    )


def save_quietly(model: Any, tokenizer: Any, folder: Path) -> None:
    from transformers.utils import logging

    # A progress bar over one small file is useless and breaks up the log.
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if had_bars:
            logging.enable_progress_bar()


def make_tokenizer(recipe: Recipe) -> Any:
    """Make a tokenizer with one token a character and no bos token. Its padding token occurs in no prompt or
    answer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        unk_token=UNKNOWN,
        pad_token=UNKNOWN,
        model_max_length=recipe.max_context,
        clean_up_tokenization_spaces=False,
    )


def training_pairs(recipe: Recipe) -> torch.Tensor:
    """Return every (a, b) whose prompt is not held out."""
    operands = range(recipe.low, recipe.high + 1)
    return torch.tensor([(a, b) for a in operands for b in operands if not recipe.holds_out(f"{a}+{b}=")])


def make_batch(pairs_B2: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> Batch:
    a_B, b_B = pairs_B2.unbind(1)
    plus, equals, eos = (torch.full((len(a_B), 1), token) for token in (PLUS, EQUALS, EOS_ID))
    sum_BD = _digits(a_B + b_B)
    wrong_BD = torch.rand(sum_BD.shape, generator=generator) < recipe.wrong_digit_share
    shift_BD = torch.randint(1, 10, sum_BD.shape, generator=generator)
    written_BD = torch.where(wrong_BD, (sum_BD + shift_BD) % 10, sum_BD)
    target_BAV = torch.zeros(len(a_B), NUM_DIGITS + 1, len(VOCABULARY))
    target_BAV[:, :-1, :10] = recipe.wrong_digit_share / 9
    target_BAV[:, :-1].scatter_(2, sum_BD[..., None], 1 - recipe.wrong_digit_share)
    target_BAV[:, -1, EOS_ID] = 1
    return Batch(
        token_ids_BL=torch.cat([_digits(a_B), plus, _digits(b_B), equals, written_BD, eos], dim=1),
        answer_BA=torch.cat([sum_BD, eos], dim=1),
        target_BAV=target_BAV,
    )


def exact_probability(model: nn.Module, pairs_B2: torch.Tensor, recipe: Recipe) -> float:
    """Return the mean probability that a sampled answer is right: the product over its tokens, eos included."""
    generator = torch.Generator().manual_seed(0)
    clean = make_batch(pairs_B2, _without_noise(recipe), generator)
    with torch.no_grad():
        logprobs_BAV = _answer_logprobs(model, clean)
    return float(logprobs_BAV.gather(2, clean.answer_BA[..., None]).sum(dim=(1, 2)).exp().mean())


def _train(recipe: Recipe, pairs: torch.Tensor, seed: int, log: Callable[[str], None]) -> tuple[Any, float]:
    """Train at the peak learning rate until the model can add, then settle. Return the model, and the
    probability that its answers are exact."""
    torch.manual_seed(seed)
    model = _new_model(recipe)
    generator = torch.Generator().manual_seed(seed)
    check = pairs[torch.randint(len(pairs), (512,), generator=generator)]
    lesson = _Lesson(recipe, model, pairs, generator)
    learnt = recipe.learnt_share * (1 - recipe.wrong_digit_share) ** NUM_DIGITS
    started = time.monotonic()
    step, last, exact = 0, recipe.max_steps, 0.0
    while step < last:
        step += 1
        is_settling = last != recipe.max_steps
        rate = (last - step) / recipe.settle_steps if is_settling else step / recipe.warmup_steps
        loss = lesson.take(recipe.lr * min(1.0, max(0.02, rate)))
        if step % recipe.check_steps and step != last:
            continue
        exact = exact_probability(model, check, recipe)
        if exact >= learnt and not is_settling:
            last = step + recipe.settle_steps
        if step % (4 * recipe.check_steps) == 0 or step == last:
            seconds = time.monotonic() - started
            log(
                f"built-in model: step {step}, loss {loss:.3f}, exact with probability {exact:.2f}, "
                f"{seconds:.0f} s"
            )
    return model, exact


class _Lesson:
    """Holds the model, its optimizer and the problems; each `take` is one supervised step."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, pairs: torch.Tensor, generator: torch.Generator
    ) -> None:
        self._recipe = recipe
        self._model = model
        self._pairs = pairs
        self._generator = generator
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
        )

    def take(self, lr: float) -> float:
        rows = torch.randint(len(self._pairs), (self._recipe.batch,), generator=self._generator)
        batch = make_batch(self._pairs[rows], self._recipe, self._generator)
        loss = -(batch.target_BAV * _answer_logprobs(self._model, batch)).sum(dim=2).mean()
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()


def _new_model(recipe: Recipe) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.mlp_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_heads,
        "max_position_embeddings": recipe.max_context,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "initializer_range": recipe.init_std,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }
    if not isinstance(recipe, MixtureRecipe):
        return LlamaForCausalLM(LlamaConfig(**sizes))
    experts = {
        "head_dim": recipe.hidden_size // recipe.num_heads,
        "moe_intermediate_size": recipe.mlp_size,
        "num_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))


def _answer_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits_BLV = model(batch.token_ids_BL[:, :-1], use_cache=False).logits
    logprobs: torch.Tensor = F.log_softmax(logits_BLV[:, -batch.answer_BA.shape[1] :], dim=-1)
    return logprobs


def _digits(numbers_B: torch.Tensor) -> torch.Tensor:
    powers = torch.tensor([10**place for place in reversed(range(NUM_DIGITS))])
    return numbers_B[:, None] // powers % 10


def _without_noise(recipe: Recipe) -> Recipe:
    from dataclasses import replace

    return replace(recipe, wrong_digit_share=0.0)


@contextmanager
def _torch_settings(threads: int) -> Iterator[None]:
    """Use our number of threads and our random state, and restore the caller's afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)
