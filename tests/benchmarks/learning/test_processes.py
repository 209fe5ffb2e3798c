import json
from pathlib import Path

from benchmarks.learning.processes import read_curve


def test_a_reward_is_at_the_time_when_it_was_known(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "heldout_reward": 0.3},
        {"step": 1, "time_s": 12.0, "step_s": 0.5, "waited_s": 1.5},
        {"step": 2, "time_s": 13.0, "step_s": 0.5, "waited_s": 0.5},
        {"step": 1, "heldout_reward": 0.5},
        {"step": 3, "time_s": 15.0, "step_s": 0.5, "waited_s": 0.5},
        {"step": 3, "heldout_reward": 0.9},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(path) == ([0.0, 3.0, 5.0], [0.3, 0.5, 0.9])
