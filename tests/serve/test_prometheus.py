"""Prometheus' text format."""

from penstock.serve.prometheus import exposition
from penstock.types import EngineReport


def test_counters_gauges_and_versions() -> None:
    report = EngineReport(
        name='en"gine',
        versions={"policy": 7},
        capabilities=(),
        num_running=2,
        num_waiting=1,
        max_context=64,
        counters={"tokens": 12_345_678.0, "free_blocks": 3.0, "busy_s": 1234567.125},
    )
    lines = exposition(report, http_requests=5).splitlines()
    assert 'penstock_tokens_total{engine="en\\"gine"} 12345678' in lines
    assert 'penstock_busy_s_total{engine="en\\"gine"} 1234567.125' in lines
    assert "# TYPE penstock_tokens_total counter" in lines
    assert 'penstock_free_blocks{engine="en\\"gine"} 3' in lines
    assert 'penstock_version{engine="en\\"gine",policy="policy"} 7' in lines
    assert 'penstock_http_generations{engine="en\\"gine"} 5' in lines
