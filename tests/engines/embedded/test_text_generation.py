import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.text_generation import FixedWeights, generate_text, stream_text
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import PenstockError, UserError
from penstock.models.config import LoraConfig
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Message, SamplingParams
from penstock.trainer.adapter import TrainedAdapter
from tests.engines.contract import update_to
from tests.engines.embedded.test_outbox import Letters


class Prompted(Letters):
    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        return [len(prompt)]


def pieces(script: list[int]) -> list[str]:
    async def main() -> list[str]:
        engine = ScriptedEngine(lambda request: script)
        stream = stream_text(engine, Prompted(), "abc", SamplingParams(), request_id="a")
        return [piece async for piece in stream]

    return asyncio.run(main())


def test_text_comes_in_whole_characters() -> None:
    assert pieces([1, 3, 5, 6, 2]) == ["a", "ab", "é", "b"]


def test_half_a_character_at_the_end_is_not_held_back() -> None:
    assert pieces([1, 5]) == ["a", "\ufffd"]


def test_answers_with_a_model_from_a_folder(tiny_model: Path) -> None:
    streamed: dict[int, str] = {0: "", 1: ""}

    def on_text(number: int, piece: str) -> None:
        streamed[number] += piece

    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    config = EngineConfig(embedded=EmbeddedConfig(kv_tokens=128))
    texts = generate_text(str(tiny_model), ["1+2=", "9"], sampling, config=config, on_text=on_text)
    assert texts == [streamed[0], streamed[1]]
    assert any(texts)
    assert texts == generate_text(str(tiny_model), ["1+2=", "9"], sampling, config=config)
    assert texts[1:] == generate_text(str(tiny_model), ["9"], sampling, config=config)


def test_an_adapter_answers_with_the_model_below_it(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter = TrainedAdapter(model, LoraConfig(rank=1, targets=("down_proj",)), base=str(tiny_model))
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor += 3.0
    adapter.save(tmp_path)
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    (adapted,), (plain,) = (generate_text(str(name), ["1+1="], greedy) for name in (tmp_path, tiny_model))
    tokenizer = ChatTokenizer(str(tiny_model))
    ids = torch.tensor([tokenizer.encode_prompt("1+1=")])
    said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    ends = [place for place, token in enumerate(said) if token in tokenizer.stop_token_ids]
    assert adapted == tokenizer.decode(said[: ends[0]] if ends else said)
    assert adapted != plain


def test_a_model_that_is_not_there_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no/such/model"):
        generate_text("no/such/model", ["a"])


def test_characters_that_the_model_does_not_see_are_named(tiny_model: Path) -> None:
    said: list[str] = []
    generate_text(str(tiny_model), ["12+3=", "12+x"], SamplingParams(max_tokens=1), say=said.append)
    assert said == [
        f"the tokenizer of {str(tiny_model)!r} has no token for 'x' (in 1 of 2 prompts): the model does not see them"
    ]


def test_fixed_weights_take_no_updates() -> None:
    with pytest.raises(PenstockError, match="takes no updates"):
        FixedWeights().stage(update_to(1))
