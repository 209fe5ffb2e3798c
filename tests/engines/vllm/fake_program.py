"""A program that is started as `vllm serve` is, and serves a `FakeVllm`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
TEXT = f"""#!{sys.executable}
import asyncio, json, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.engines.vllm.fake_server import FakeVllm

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def tokenize(text):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(sys.argv[2])(text, add_special_tokens=False)["input_ids"]

async def main():
    fake = FakeVllm(max_context=int(option("--max-model-len")), token_s=TOKEN_S, tokenize=tokenize)
    async with fake.served(Path(option("--uds"))):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def fake_vllm(folder: Path, token_s: float = 0.002) -> str:
    """The path of the program, which takes so long for a token."""
    path = folder / "fake-vllm"
    path.write_text(TEXT.replace("TOKEN_S", str(token_s)))
    path.chmod(0o755)
    return str(path)
