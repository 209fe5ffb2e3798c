import json
from pathlib import Path

import pytest

from penstock.bench.engine_gpu import JOBS, SMALL, engine_config, run
from penstock.cli.bench import EngineJob
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.errors import ConfigError


def test_all_jobs_run_and_the_headline_is_made_of_them(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    report = run(path, shape="tiny", sizes=SMALL)
    assert report["uniform"]["tokens_per_s"] * report["uniform"]["seconds"] == pytest.approx(96)
    assert report["headline"]["tokens_per_s"] == report["uniform"]["tokens_per_s"]
    tail = report["long_tail"]
    assert report["headline"]["long_tail_fraction"] == tail["tokens_per_s"] / tail["uniform_tokens_per_s"]
    masks = report["masks"]
    assert masks["both_cost"] == masks["recorded_s"] / masks["plain_s"] - 1
    assert report["floor"]["step_weights_gb"] > 0
    assert json.loads(path.read_text())["headline"] == report["headline"]


def test_one_job_alone_has_its_own_headline() -> None:
    report = run(shape="tiny", sizes=SMALL, only="masks")
    assert list(report["headline"]) == ["mask_cost", "top_p_cost"]
    report = run(shape="tiny", sizes=SMALL, only="uniform", settings=["engine.embedded.max_batch=2"])
    assert list(report["headline"]) == ["tokens_per_s"]
    assert report["setting"] == {"shape": "tiny", "batch": 2, "engine": ["engine.embedded.max_batch=2"]}


def test_the_command_knows_the_jobs() -> None:
    assert tuple(job.value for job in EngineJob) == JOBS


def test_settings_go_over_what_the_jobs_need() -> None:
    config = engine_config(
        "cpu", SMALL, EngineConfig(embedded=EmbeddedConfig(kv_dtype="float8", max_batch=2))
    )
    assert (config.embedded.kv_dtype, config.embedded.max_batch, config.max_context) == ("float8", 2, 54)
    with pytest.raises(ConfigError, match="did you mean 'engine.embedded.window'"):
        run(shape="tiny", sizes=SMALL, settings=["engine.windw=2"])
    with pytest.raises(ValueError, match="only must be one of uniform, masks, long_tail, got 'mask'"):
        run(shape="tiny", sizes=SMALL, only="mask")
