from penstock.bench.journal_cost import Arm, pair, report, sentence


def arm(episodes_per_s: float, cpu: float) -> Arm:
    return {"episodes_per_s": episodes_per_s, "controller_us_per_episode": cpu}


def test_the_median_of_the_ratios_of_pairs_counts() -> None:
    measured = [(arm(98, 130), arm(100, 100)), (arm(50, 150), arm(40, 90)), (arm(9, 111), arm(10, 101))]
    result = report(measured)
    assert result["headline"] == {"journal_throughput_ratio": 0.98}
    assert result["controller_us_per_episode_more"] == 30
    assert sentence(measured).startswith("3 pairs: throughput with the journal 0.980 of without, 30 µs")


def test_pairs_alternate_in_who_goes_first() -> None:
    order: list[bool] = []

    def one(journal: bool) -> Arm:
        order.append(journal)
        return arm(2.0 if journal else 1.0, 0)

    for first in (True, False):
        kept, plain = pair(one, first=first)
        assert (kept["episodes_per_s"], plain["episodes_per_s"]) == (2.0, 1.0)
    assert order == [True, False, False, True]
