import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from penstock.errors import UserError
from penstock.models import load, support, tokenizer
from penstock.models.load import check_device, load_model, resolve_dtype


def test_a_broken_weights_file_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model\.safetensors is broken"):
        load_model(str(folder))


def test_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("float16", "cuda") == "float16"
    for has_it, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, has=has_it: has)
        assert resolve_dtype("auto", "cuda:1") == dtype


@pytest.mark.parametrize("trusted", [False, True])
def test_a_models_own_code_runs_only_where_it_is_trusted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    seen: list[Any] = []

    class Auto:
        @staticmethod
        def from_pretrained(*_: object, **options: object) -> None:
            seen.append(options["trust_remote_code"])
            raise ValueError("enough")

    monkeypatch.setattr(load, "AutoModelForCausalLM", Auto)
    monkeypatch.setattr("transformers.AutoTokenizer", Auto)
    monkeypatch.setattr("transformers.AutoConfig", Auto)
    for call in (load.load_model, support.load_config, tokenizer.ChatTokenizer, tokenizer.model_context):
        with pytest.raises(UserError, match="enough"):
            call(str(tiny_model), trust_remote_code=trusted)
    assert seen == [trusted] * 4


def test_a_gpu_that_torch_cant_use_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        check_device(device)
    with pytest.raises(UserError, match=r"^there is no device cuda:2: torch .* can use 2 GPUs here"):
        load_model(str(tiny_model), device="cuda:2")


def test_a_model_is_refused_before_its_weights_are_read(tmp_path):
    CONFIG_MAPPING["falcon"]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="FalconForCausalLM can't be served"):
        load_model(str(tmp_path))
