"""The models and steps that `python -m benchmarks scale` works with, the same in every process."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.train_steps import Load, make_plans, num_forward_tokens
from penstock.algorithms.config import AlgorithmConfig
from penstock.records import StepPlan
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.parallel.process_ranks import ProcessRanks
from penstock.trainer.policy_trainer import PolicyTrainer

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512},
    "9m": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "vocab_size": 8192},
    "42m": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 16384},
}
LOAD = Load(
    groups=8, members=4, prompt=(16, 32), median=24, longest=64, micro_batch_tokens=512, chunk_tokens=256
)


def make_model(size: str) -> Any:
    config = Qwen2Config(
        **SIZES[size], num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def make_trainer(size: str, ranks: ProcessRanks | None) -> PolicyTrainer:
    parallel = ParallelConfig() if ranks is None else ranks.layout.parallel
    config = TrainerConfig(
        dtype="float32",
        compile="off",
        learning_rate=1e-6,
        logprob_gap_warning=1e9,
        micro_batch_tokens=LOAD.micro_batch_tokens,
        logprob_chunk_tokens=LOAD.chunk_tokens,
        parallel=parallel,
    )
    return PolicyTrainer(
        make_model(size), config=config, algorithm=AlgorithmConfig(), total_steps=100, parallel=ranks
    )


def plans_of(size: str, number: int, num_plans: int) -> tuple[StepPlan, ...]:
    return make_plans(LOAD, SIZES[size]["vocab_size"], number, ranks=num_plans)


def tokens_of(size: str, number: int) -> int:
    """Of the step, on however many ranks."""
    return sum(num_forward_tokens(plan) for plan in plans_of(size, number, 1))
