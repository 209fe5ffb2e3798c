"""Makes model shapes with random weights, so that benchmarks need no download."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""The shapes of SmolLM2 (135m) and Qwen2.5, and one that fits any machine."""


def make_shape(name: str, device: str, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """Make a random Qwen2 model of this shape, in eval mode."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    if name not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}")
    config = Qwen2Config(**SHAPES[name], max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model.eval()


def save_shape(name: str, folder: Path, device: str, chat_template: str | None = None) -> None:
    """Save a random model of this shape as a folder that workers can load, in bfloat16 on a GPU. Its tokenizer
    knows only digits; ids beyond them have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<end>"
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate((end, *"0123456789"))}, unk_token=end)
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    model: Any = make_shape(name, device, torch.bfloat16 if device != "cpu" else torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def num_matrix_parameters(model: Any) -> int:
    """Count the parameters that every token is multiplied with: all but an embedding that is only looked up."""
    tied = model.config.tie_word_embeddings
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    return int(sum(parameter.numel() for parameter in model.parameters()) - looked_up)


def hardware(device: str) -> dict[str, str]:
    import transformers

    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
