import logging
import threading

import pytest

from penstock.interfaces import Ranks
from penstock.trainer.gap_watch import GapWatch
from penstock.trainer.ranks import SingleRank, ThreadRanks
from penstock.types import Metric
from penstock.types.metrics import Max, Mean


def gap(total: float, weight: float, largest: float) -> dict[str, Metric]:
    return {"logprob_gap_mean": Mean(total=total, weight=weight), "logprob_gap_max": Max(value=largest)}


def test_the_first_and_every_hundredth_gap_is_told(caplog: pytest.LogCaptureFixture) -> None:
    watch = GapWatch(0.05)
    with caplog.at_level(logging.WARNING):
        watch.see({}, 1, SingleRank())
        watch.see(gap(0.5, 10.0, 0.2), 2, SingleRank())
        assert (watch.num_warnings, caplog.records) == (0, [])
        for step in range(3, 104):
            watch.see(gap(1.0, 10.0, 0.2), step, SingleRank())
    assert watch.num_warnings == 101
    assert [record.args for record in caplog.records] == [(3, 0.1, 0.2, 0.05), (103, 0.1, 0.2, 0.05)]


def test_ranks_judge_the_gap_of_the_whole_step(caplog: pytest.LogCaptureFixture) -> None:
    """Far above the limit on one rank, below it on both together; then above it, where one rank has no tokens."""
    watches = [GapWatch(0.05), GapWatch(0.05)]

    def see(watch: GapWatch, ranks: Ranks, steps: list[dict[str, Metric]]) -> None:
        for step, metrics in enumerate(steps, start=1):
            watch.see(metrics, step, ranks)

    plans = [[gap(2.0, 10.0, 0.9), gap(6.0, 60.0, 0.4)], [gap(1.0, 90.0, 0.1), {}]]
    threads = [
        threading.Thread(target=see, args=each)
        for each in zip(watches, ThreadRanks.of(2), plans, strict=True)
    ]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [watch.num_warnings for watch in watches] == [1, 1]
    assert [record.args for record in caplog.records] == [(2, 0.1, 0.4, 0.05)]
