import json
from pathlib import Path

import pytest
import torch

from penstock.bench.train_sharded import SHARDED, UNSHARDED, run


# Compiling a checkpointed layer, Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_single_shard_makes_the_steps_of_the_plain_trainer(tmp_path: Path) -> None:
    """On a GPU over NCCL and in bfloat16, where sums of another factor than 1 would be zero."""
    run(tmp_path / "sharded.json", shape="tiny", steps=2)
    written = json.loads((tmp_path / "sharded.json").read_text())
    plain, sharded = written["arms"][UNSHARDED], written["arms"][SHARDED]
    assert sharded["gradient_norm"] == pytest.approx(
        plain["gradient_norm"], rel=0.02 if torch.cuda.is_available() else 1e-5
    )
    assert sharded["tokens"] == plain["tokens"] > 0
    ratio = sharded["tokens_per_s"] / plain["tokens_per_s"]
    assert written["headline"] == {"sharded_of_unsharded": pytest.approx(ratio)}
