import json
from pathlib import Path

from penstock.bench.chaos.noted_turns import count_again, json_lines


def test_only_tokens_with_another_version_were_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    assert list(json_lines(path)) == []
    rows = [
        ["g0.0.0", [1, 1, 1]],
        ["g0.1.0", [1, 1]],
        ["g0.0.0", [1, 1, 1]],  # from the journal
        ["g0.1.0", [1, 4, 4]],  # went on after its first token
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '["g0.2.0", [1')
    assert count_again(json_lines(path)) == (1, 7)
