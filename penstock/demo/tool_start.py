"""Trains the supervised start of `builtin-tools`: a tiny model that chats and sometimes calls a calculator.

The model can't add. Its teacher guesses most answers and calls the tool for some; now and then it writes a
wrong digit, in a call or in a result that it repeats. So there is something to learn: to call the tool, with
the right numbers, and to repeat its result.

    <|user|>214+387=<|end|><|assistant|>CALL 214 AND 387 CLOSE<|end|><|tool|>601<|end|><|assistant|>601<|end|>
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.demo.model import ToolRecipe
from penstock.demo.supervised_start import save_quietly

USER, ASSISTANT, TOOL, END, UNKNOWN = "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<unk>"
CALL, AND, CLOSE = '<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
VOCABULARY = (*"0123456789", "+", "=", CALL, AND, CLOSE, USER, ASSISTANT, TOOL, END, UNKNOWN)
ID = {token: number for number, token in enumerate(VOCABULARY)}
IGNORED = -100
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {"a": {{ call.function.arguments.a }}, '
    '"b": {{ call.function.arguments.b }}}}</tool_call>{% endfor %}<|end|>'
    "{% elif message.role == 'tool' %}<|tool|>{{ message.content }}<|end|>"
    "{% elif message.role == 'user' %}<|user|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_and_save_tools(
    recipe: ToolRecipe, folder: Path, *, log: Callable[[str], None], threads: int
) -> None:
    """Train for the recipe's number of steps, and write model and tokenizer."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = _taught(recipe, log)
    finally:
        torch.set_num_threads(before)
    save_quietly(model, make_tool_tokenizer(recipe), folder)


def make_tool_tokenizer(recipe: ToolRecipe) -> Any:
    """Make a tokenizer with one token a character, and one for each fixed piece of a call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(ID), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (CALL, AND, CLOSE)])
    tokenizer.add_special_tokens([USER, ASSISTANT, TOOL, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        unk_token=UNKNOWN,
        pad_token=UNKNOWN,
        model_max_length=recipe.max_context,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def conversation(recipe: ToolRecipe, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return the token ids and the targets of one example by the teacher. All but the assistant's tokens are
    ignored."""
    a, b = _operands(recipe, rng)
    token_ids, targets = _ids([USER, *f"{a}+{b}=", END, ASSISTANT]), []
    targets = [IGNORED] * len(token_ids)

    def say(*pieces: str) -> None:
        token_ids.extend(_ids([*pieces, END]))
        targets.extend(_ids([*pieces, END]))

    if rng.random() >= recipe.call_share:
        say(*(str(rng.randrange(10)) for _ in range(3)))
        return token_ids, targets
    written = [_noisy(str(number), recipe, rng) for number in (a, b)]
    say(CALL, *written[0], AND, *written[1], CLOSE)
    result = str(int(written[0]) + int(written[1]))
    result_ids = _ids([TOOL, *result, END, ASSISTANT])
    token_ids += result_ids
    targets += [IGNORED] * len(result_ids)
    say(*_noisy(result, recipe, rng))
    return token_ids, targets


def _taught(recipe: ToolRecipe, log: Callable[[str], None]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.mlp_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            max_position_embeddings=recipe.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            initializer_range=recipe.init_std,
            bos_token_id=None,
            eos_token_id=ID[END],
            pad_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.01, betas=(0.9, 0.98))
    rng = random.Random(recipe.seed)
    for step in range(1, recipe.max_steps + 1):
        left = (recipe.max_steps - step) / recipe.settle_steps
        optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, step / recipe.warmup_steps, max(0.02, left))
        loss = _loss(model, [conversation(recipe, rng) for _ in range(recipe.batch)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            log(f"built-in model with tools: step {step}/{recipe.max_steps}, loss {loss.item():.3f}")
    return model


def _loss(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    size = max(len(token_ids) for token_ids, _ in rows)
    tokens_BL = torch.tensor([ids + [ID[UNKNOWN]] * (size - len(ids)) for ids, _ in rows])
    targets_BL = torch.tensor([targets + [IGNORED] * (size - len(targets)) for _, targets in rows])
    logits_BLV = model(tokens_BL[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL[:, 1:].flatten(), ignore_index=IGNORED)


def _operands(recipe: ToolRecipe, rng: random.Random) -> tuple[int, int]:
    """Draw the operands of a problem that is not held out."""
    while True:
        a, b = (rng.randint(recipe.low, recipe.high) for _ in range(2))
        if not recipe.holds_out(f"{a}+{b}="):
            return a, b


def _noisy(digits: str, recipe: ToolRecipe, rng: random.Random) -> str:
    """Replace some digits at random. No number begins with 0, which JSON forbids."""
    return "".join(
        str(rng.randint(0 if place else 1, 9)) if rng.random() < recipe.wrong_digit_share else digit
        for place, digit in enumerate(digits)
    )


def _ids(pieces: list[str]) -> list[int]:
    return [ID[piece] for piece in pieces]
