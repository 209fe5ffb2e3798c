"""Defines the work of `penstock bench loop`: a small random model that learns to write one digit more often.

Answers have a fixed length (no stop token), so both arms do exactly the same amount of work; prompts are long
enough that training costs what it does in real runs. The reward is the share of sevens.
"""

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Episode, Task

HEAD_DIM = 32


class EndlessTokenizer(ChatTokenizer):
    """Has no stop tokens, so that answers end only at their full length."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return ()


def make_model(folder: Path, tokenizer_from: Path, *, width: int, layers: int) -> Path:
    """Make a random model with the vocabulary of the built-in one, saved where workers can load it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // HEAD_DIM,
            num_key_value_heads=width // HEAD_DIM,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tasks(count: int, prompt_tokens: int, seed: int = 0) -> list[Task]:
    draw = random.Random(seed)
    prompts = ("".join(draw.choice("0123456789") for _ in range(prompt_tokens)) for _ in range(count))
    return [Task(id=f"bench-{i}", prompt=prompt) for i, prompt in enumerate(prompts)]


def reward(task: Task, completion: str) -> float:
    return completion.count("7") / max(1, len(completion))


def share_of_even_tokens(task: Task, episode: Episode) -> float:
    """Reward even token ids, a share that differs within every group even where most ids have no text."""
    ids = episode.turns[-1].output_ids
    return float((ids % 2 == 0).mean())
