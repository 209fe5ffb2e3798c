import json
from pathlib import Path

import pytest

from penstock.bench.engine_gpu import Sizes, engine_config, run
from penstock.engines.config import EngineConfig
from penstock.errors import ConfigError

SIZES = Sizes(
    batch=4,
    prompt=5,
    answer=6,
    queued=10,
    median=3,
    longest=20,
    masked_answer=4,
    repeats=1,
    contenders=2,
    contenders_answer=4,
)


def test_all_jobs_run_and_the_headline_is_made_of_them(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    report = run(path, shape="tiny", sizes=SIZES)
    assert report["uniform"]["tokens_per_s"] * report["uniform"]["seconds"] == pytest.approx(24)
    assert report["headline"]["tokens_per_s"] == report["uniform"]["tokens_per_s"]
    tail = report["long_tail"]
    assert report["headline"]["long_tail_fraction"] == tail["tokens_per_s"] / tail["uniform_tokens_per_s"]
    masks = report["masks"]
    assert masks["both_cost"] == masks["recorded_s"] / masks["plain_s"] - 1
    assert report["floor"]["step_weights_gb"] > 0
    assert json.loads(path.read_text())["headline"] == report["headline"]


def test_one_job_alone_has_its_own_headline() -> None:
    report = run(shape="tiny", sizes=SIZES, only="masks")
    assert list(report["headline"]) == ["mask_cost", "top_p_cost"]
    report = run(shape="tiny", sizes=SIZES, only="uniform", settings=["engine.max_batch=2"])
    assert list(report["headline"]) == ["tokens_per_s"]
    assert report["setting"] == {"shape": "tiny", "batch": 2, "engine": ["engine.max_batch=2"]}


def test_settings_go_over_what_the_jobs_need() -> None:
    config = engine_config("cpu", SIZES, EngineConfig(kv_dtype="float8", max_batch=2))
    assert (config.kv_dtype, config.max_batch, config.max_context) == ("float8", 2, 25)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        run(shape="tiny", sizes=SIZES, settings=["engine.windw=2"])
    with pytest.raises(ValueError, match="only must be one of uniform, masks, long_tail, got 'mask'"):
        run(shape="tiny", sizes=SIZES, only="mask")
