import json
from pathlib import Path

import pytest

from penstock.bench.engine_gpu import Sizes, run


def test_all_jobs_run_and_the_headline_is_made_of_them(tmp_path: Path) -> None:
    sizes = Sizes(
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
    path = tmp_path / "engine.json"
    report = run(path, shape="tiny", sizes=sizes)
    assert report["uniform"]["tokens_per_s"] * report["uniform"]["seconds"] == pytest.approx(24)
    assert report["headline"]["tokens_per_s"] == report["uniform"]["tokens_per_s"]
    tail = report["long_tail"]
    assert report["headline"]["long_tail_fraction"] == tail["tokens_per_s"] / tail["uniform_tokens_per_s"]
    masks = report["masks"]
    assert masks["both_cost"] == masks["recorded_s"] / masks["plain_s"] - 1
    assert report["floor"]["step_weights_gb"] > 0
    assert json.loads(path.read_text())["headline"] == report["headline"]
