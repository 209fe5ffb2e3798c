"""What several tests share: a tiny random model with a character tokenizer, made once. And where there is no
GPU, kernels run under Triton's interpreter, which Triton wants to know before it is imported."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=40, help="how many crash schedules to play")
    parser.addoption("--verifiers", help="the Python that has verifiers, for tests/verifiers_live")
    parser.addoption("--vllm", help="the program that starts vLLM, for tests/vllm_live")
    parser.addoption(
        "--vllm-url", help="a server that runs already, with the demo's model and a context of 512"
    )
    parser.addoption("--vllm-lora-url", help="the same, with room for adapters of rank 4")
    parser.addoption("--ray", action="store_true", help="start a Ray cluster, for tests/ray_live")
    parser.addoption("--ray-node", action="store_true", help="this is a node of that cluster")
    parser.addoption("--chromium", help="a Chromium, for tests/browser")
    parser.addoption("--first-seed", type=int, default=0, help="the first of them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes share one worker: two at once would fight over two cores."""
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    """Take back the threads that a test gave torch: two test workers with two threads each are slower than with one."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1 and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama over digits; id 0 ends a sequence; it pads with the end; there is no chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_model")
    vocabulary = {
        "<eos>": 0,
        **{character: index for index, character in enumerate("0123456789+= ", start=1)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def padless_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The same model, its tokenizer without a pad token."""
    folder = shutil.copytree(tiny_model, tmp_path / "padless_model")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    return folder
