from penstock.observe.reading.counter_series import CounterSeries
from tests.observe.examples import counters


def test_every_number_has_its_own_times() -> None:
    series = CounterSeries()
    series.add(counters("engine0", 1.0, tokens=5.0))
    series.add(counters("engine0", 2.0, tokens=7.0, running=3.0))
    series.add(counters("machine", 2.0, cpu=0.5))
    assert series.processes == ["engine0", "machine"]
    found = series.of("engine0")
    assert (found["tokens"].times.tolist(), found["tokens"].values.tolist()) == ([1.0, 2.0], [5.0, 7.0])
    assert found["running"].times.tolist() == [2.0]
    assert series.of("nobody") == {}
