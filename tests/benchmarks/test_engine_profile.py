import torch

from benchmarks.engine_profile import profile_engine
from penstock.bench.engine_contenders import make_workload
from penstock.bench.engine_cpu import make_models
from tests.bench.test_engine_cpu import SHAPE


def test_shares_are_of_all_the_time() -> None:
    torch.set_num_threads(1)
    model, _ = make_models(SHAPE, "cpu", "float32")
    shares = profile_engine(model, make_workload(SHAPE.config["vocab_size"], longest=6))
    assert 0.9 < sum(shares.values()) < 1.1
    assert set(shares) == {"matmuls", "attention", "cache_reads_and_writes", "other_operators", "python"}
