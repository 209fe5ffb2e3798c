import numpy as np

from penstock.observe.reading.step_table import StepTable
from penstock.observe.store.segments import StoredStep


def stored(number: int, values: tuple[float, ...], columns: int = 0) -> StoredStep:
    return StoredStep(
        process="controller",
        time=10.0 * number,
        step=number,
        reward=values[0],
        num_samples=4,
        columns=columns,
        values=np.array(values, "<f8").tobytes(),
        seconds={},
        waited_s=0.0,
        took_s=0.0,
        max_staleness=4,
        groups=(),
        waits={},
        own_metrics=(),
    )


def table(count: int) -> StepTable:
    steps = StepTable()
    steps.add_columns(0, ("reward", "answer_tokens_mean"))
    for number in range(1, count + 1):
        steps.add(stored(number, (number / 10, 5.0)))
    return steps


def test_columns_grow_with_the_steps() -> None:
    steps = table(3)
    assert steps.column("reward").tolist() == [0.1, 0.2, 0.3]
    steps.add_columns(1, ("reward", "kl"))
    steps.add(stored(4, (0.5, 7.0), columns=1))
    assert steps.column("reward").tolist() == [0.1, 0.2, 0.3, 0.5]
    assert steps.column("kl").tolist()[3:] == [7.0]
    assert np.isnan(steps.column("kl")[:3]).all()
    assert steps.names == ["reward", "answer_tokens_mean", "kl"]


def test_a_step_that_comes_again_replaces_all_after_it() -> None:
    steps = table(5)
    assert steps.column("reward").size == 5
    steps.add(stored(3, (0.9, 5.0)))
    assert steps.numbers.tolist() == [1, 2, 3]
    assert steps.column("reward").tolist() == [0.1, 0.2, 0.9]
    assert steps.num_undone == 3


def test_a_curve_is_thinned_with_its_extremes() -> None:
    steps = table(1000)
    buckets = steps.thinned("reward", buckets=10)
    assert len(buckets) == 10
    assert (buckets[0].low, buckets[0].high, buckets[-1].high) == (0.1, 10.0, 100.0)
    assert buckets[0].x == 50.5
    assert abs(buckets[0].mean - 5.05) < 1e-9
    assert [one.mean for one in table(3).thinned("reward", x="time")] == [0.1, 0.2, 0.3]
    assert [one.x for one in table(2).thinned("reward", x="time")] == [10.0, 20.0]
    assert [one.x for one in table(2).thinned("reward", x="tokens")] == [20.0, 40.0]
    assert table(3).thinned("gone") == []
