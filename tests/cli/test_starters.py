from pathlib import Path

import pytest
import yaml

from penstock.cli.starters import DEMO, STARTERS
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.run.preflight import prepare


@pytest.mark.parametrize("text", [DEMO, *STARTERS.values()], ids=["demo", *STARTERS])
def test_a_starter_is_a_short_config_with_keys_that_matter(text: str) -> None:
    config = build(PenstockConfig, yaml.safe_load(text))
    assert 22 <= len(text.splitlines()) <= 30
    assert max(len(line) for line in text.splitlines()) <= 120
    assert config.run.name in {"first", *STARTERS}
    assert config.algorithm == PenstockConfig().algorithm


FILES = {
    "train.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
    "heldout.jsonl": '{"prompt": "1+2=", "answer": "3"}\n',
    "agent.py": "async def episode(task, rollout):\n    return 0.0\n",
}


@pytest.mark.parametrize("like", [None, "jsonl", "agent"])
def test_those_with_a_built_in_model_pass_every_check_as_they_are(
    like: str | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself is a tiny one here."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content)
    monkeypatch.setattr("penstock.run.preflight.open_builtin", lambda name, cache, log: str(tiny_model))
    config = build(PenstockConfig, yaml.safe_load(DEMO if like is None else STARTERS[like]))
    prepared = prepare(config, log=lambda line: None, cache=tmp_path)
    assert (len(prepared.tasks), prepared.folder.name) == (1 if like == "jsonl" else 4000, config.run.name)
