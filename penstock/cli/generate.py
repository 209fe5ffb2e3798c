"""`penstock generate`: one prompt streams as it comes, several are printed one after another."""

import sys
from collections.abc import Sequence

from penstock.api import cache_folder
from penstock.demo.model import open_builtin
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.text_generation import Prompt, generate_text
from penstock.observe.plain_text import plain_block
from penstock.orchestration.placement import usable_cores
from penstock.types import Message, SamplingParams
from penstock.worker.quiet import quieten


def generate_to_terminal(model: str, prompts: Sequence[str], sampling: SamplingParams, *, chat: bool) -> None:
    quieten()
    model = open_builtin(model, cache_folder(), log=lambda line: print(line, file=sys.stderr))
    asked: list[Prompt] = [(Message(role="user", content=prompt),) if chat else prompt for prompt in prompts]
    config = EngineConfig(threads=usable_cores(), record_routing="off")
    if len(asked) == 1:
        generate_text(model, asked, sampling, config=config, on_text=_stream)
        print()
        return
    for prompt, text in zip(prompts, generate_text(model, asked, sampling, config=config), strict=True):
        print(f"{prompt} → {plain_block(text)}")


def _stream(_: int, piece: str) -> None:
    print(plain_block(piece), end="", flush=True)
