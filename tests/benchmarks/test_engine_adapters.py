from benchmarks.engine_adapters import run
from penstock.bench.engine_gpu import SMALL


def test_the_ratio_is_of_the_uniform_job_with_and_without_adapters() -> None:
    report = run(shape="tiny", sizes=SMALL, counts=[1, 2], rank=4)
    base = report["uniform"]["tokens_per_s"]
    headline = report["headline"]
    assert list(headline) == ["tokens_per_s", "adapter_throughput_ratio", "adapter_throughput_ratio_2"]
    assert headline["adapter_throughput_ratio"] == report["adapters"]["1"]["tokens_per_s"] / base
    assert headline["adapter_throughput_ratio_2"] == report["adapters"]["2"]["tokens_per_s"] / base
