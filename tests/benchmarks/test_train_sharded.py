import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.train_sharded import SHARDED, UNSHARDED, run


# Compiling a checkpointed layer, Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_single_shard_makes_the_steps_of_the_plain_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU over NCCL and in bfloat16, where sums of another factor than 1 would be zero."""
    run(tmp_path / "sharded.json", shape="tiny", rounds=3, steps=1)
    written = json.loads((tmp_path / "sharded.json").read_text())
    plain, sharded = written["arms"][UNSHARDED], written["arms"][SHARDED]
    assert sharded["gradient_norm"] == pytest.approx(
        plain["gradient_norm"], rel=0.02 if torch.cuda.is_available() else 1e-5
    )
    assert sharded["tokens"] == plain["tokens"] > 0
    assert len(written["ratios"]) == 3
    assert written["headline"] == {"sharded_of_unsharded": statistics.median(written["ratios"])}
    shown = capsys.readouterr().out
    assert [f"round {number}: unsharded" in shown for number in (1, 2, 3, 4)] == [True, True, True, False]
