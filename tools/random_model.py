"""A model with random weights and a tokenizer, as a folder: to rehearse a recipe where no hub can be reached.

    python tools/random_model.py FOLDER --shape 1.5b --config examples/one_gpu/config.yaml
    penstock train examples/one_gpu/config.yaml model.name=FOLDER

Speed and memory are those of a trained model of this shape, except that answers hardly ever end by themselves: they
all have `rollout.max_new_tokens`. The tokenizer is trained on the prompts of the config's own tasks, so that they
have about as many tokens as with a real one, and is padded to the shape's vocabulary.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from penstock.bench.shapes import SHAPES, make_shape
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.tasks.sources import load_tasks

LEARNT = 4096
"""At most so many tokens are learnt: with more, the templates of a procedural dataset become tokens themselves."""
END, BEGIN, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompts(config: PenstockConfig) -> Iterator[str]:
    for task in load_tasks(config.tasks):
        if isinstance(task.prompt, str):
            yield task.prompt
        else:
            yield from (message.content for message in task.prompt)


def make_tokenizer(texts: Iterator[str], num_tokens: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs learnt from the texts; what is left of the vocabulary are words that no text has."""
    special = [PAD, BEGIN, END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=min(num_tokens, LEARNT),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = num_tokens - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|unused{number}|>", normalized=False) for number in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(PenstockConfig, arguments.config)
    num_tokens = SHAPES[arguments.shape]["vocab_size"]
    tokenizer = make_tokenizer(prompts(config), num_tokens)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_shape(arguments.shape, device, torch.bfloat16)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    model.save_pretrained(arguments.folder)  # type: ignore[operator]
    tokenizer.save_pretrained(arguments.folder)
    print(f"{arguments.folder}: {arguments.shape}, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main()
