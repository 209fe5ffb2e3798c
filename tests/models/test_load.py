import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.models import load, tokenizer
from penstock.models.load import load_model


def test_a_broken_weights_file_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model\.safetensors is broken"):
        load_model(str(folder))


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
    monkeypatch.setattr(load, "AutoConfig", Auto)
    monkeypatch.setattr("transformers.AutoTokenizer", Auto)
    monkeypatch.setattr("transformers.AutoConfig", Auto)
    for call in (load.load_model, load.load_config, tokenizer.ChatTokenizer, tokenizer.model_context):
        with pytest.raises(UserError, match="enough"):
            call(str(tiny_model), trust_remote_code=trusted)
    assert seen == [trusted] * 4
