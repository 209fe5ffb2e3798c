from pathlib import Path

import pytest

from penstock.cli import serve as command
from penstock.engines.config import EngineConfig
from penstock.serve.serving import ServeSettings
from tests.models.test_adapter_folder import make as make_adapter


def test_a_run_is_served_by_its_name_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[ServeSettings] = []

    async def serve(settings: ServeSettings, config: EngineConfig, say: object) -> None:
        served.append(settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "serve", serve)
    Path("runs/demo").mkdir(parents=True)
    make_adapter(Path("runs/demo/model"), base_model_name_or_path=str(tmp_path))
    Path("runs/demo/config.yaml").touch()
    command.serve_model(
        "demo", name="", host="127.0.0.1", port=0, token_file=None, updates=False, overrides=[]
    )
    (settings,) = served
    assert (settings.name, settings.model, settings.adapter) == ("demo", str(tmp_path), "runs/demo/model")
    assert capsys.readouterr().err == "demo is a run: its model runs/demo/model\n"
