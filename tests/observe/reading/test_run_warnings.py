from pathlib import Path

import msgspec
import pytest

from penstock.observe.events import EvaluationEvent, RecoveryEvent
from penstock.observe.reading.run_warnings import warnings_of
from tests.observe.examples import drop, phase, run_event, step
from tests.observe.store.written import read, sample, write

DONE = phase("done", 500.0)


def alike(number: int) -> float:
    return 1.0 if number < 30 else 0.01


def steps(count: int = 60, *, reward=lambda number: number / 60, **metrics):
    """`metrics` are functions of the number of the step."""
    return [
        msgspec.structs.replace(
            step(number, 100.0 + number, reward=reward(number)),
            metrics={name: float(value(number)) for name, value in metrics.items()},
            groups=(number,),
        )
        for number in range(1, count + 1)
    ]


def heldout(step_: int, reward: float) -> EvaluationEvent:
    return EvaluationEvent(
        process="controller", time=400.0 + step_, step=step_, reward=reward, num_episodes=8, num_failed=0
    )


def found(folder: Path, *events) -> list[str]:
    write(folder, [run_event(), *events])
    return [warning.what for warning in warnings_of(read(folder))]


@pytest.mark.parametrize(
    ("events", "what"),
    [
        (steps(), "the run did not end by itself"),
        (
            [*steps(), *(drop("stale", 400.0, group=90 + n) for n in range(9)), DONE],
            "13% of all groups were dropped",
        ),
        ([*steps(), *(sample(n, failure="timeout") for n in range(9)), DONE], "9 episodes failed"),
        ([*steps(), heldout(0, 0.5), heldout(60, 0.4), DONE], "held-out reward did not improve"),
        ([*steps(100, reward=lambda n: 1 - abs(n - 40) / 60), DONE], "the reward has fallen since its best"),
        (
            [*steps(reward_form=lambda n: 1 - n / 60, reward_exact=lambda n: n / 30), DONE],
            "reward_form fell while the reward rose",
        ),
        ([*steps(zero_advantage_fraction=lambda n: 0.95), DONE], "most groups teach nothing"),
        ([*steps(grad_norm=lambda n: 0.0), DONE], "the gradient is zero"),
        ([*steps(skipped_updates=lambda n: 2), DONE], "2 updates were skipped"),
        ([*steps(reward=lambda n: 0.5, entropy=alike), DONE], "answers have become alike"),
        (
            [*steps(entropy=alike), heldout(0, 0.5), heldout(60, 0.4), DONE],
            "answers have become alike",
        ),
        ([*steps(ess=lambda n: 0.2), DONE], "few tokens carry the gradient"),
        ([*steps(logprob_gap_mean=lambda n: 0.5), DONE], "engine and trainer disagree on the same weights"),
        ([*steps(nonfinite_logprobs=lambda n: n == 3), DONE], "logprobs were not finite"),
        ([*steps(truncated_fraction=lambda n: 0.5), DONE], "50% of answers are cut off"),
        (
            [*steps(reward=lambda n: 0.5, answer_tokens_mean=lambda n: 10.0 * n), DONE],
            "answers grow without a better reward",
        ),
        ([*steps(), *steps(20), DONE], "60 steps were undone and trained again"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rule_speaks_when_it_should(tmp_path: Path, events, what: str) -> None:
    assert what in found(tmp_path, *events)


def test_a_good_run_has_no_warning(tmp_path: Path) -> None:
    good = steps(
        entropy=lambda n: 1 - n / 100,
        grad_norm=lambda n: 1,
        ess=lambda n: 0.9,
        skipped_updates=lambda n: 0,
        truncated_fraction=lambda n: 0.01,
        zero_advantage_fraction=lambda n: 0.3,
        logprob_gap_mean=lambda n: 1e-4,
    )
    assert found(tmp_path, *good, heldout(0, 0.2), heldout(60, 0.8), DONE) == []


@pytest.mark.parametrize(
    "evaluations", [[], [heldout(0, 0.2), heldout(60, 0.8)]], ids=["training reward", "held-out reward"]
)
def test_answers_that_become_alike_and_better_are_no_warning(tmp_path: Path, evaluations) -> None:
    assert found(tmp_path, *steps(entropy=alike), *evaluations, DONE) == []


def test_waits_and_recoveries_are_named(tmp_path: Path) -> None:
    lost = RecoveryEvent(
        process="controller", time=300.0, worker="engine0", incarnation=2, cause="it was killed", took_s=3.0
    )
    waiting = [
        msgspec.structs.replace(one, waited_s=0.75, took_s=0.25, waits={"generation": 0.75})
        for one in steps()
    ]
    words = found(tmp_path, phase("training", 100.0), *waiting, phase("evaluating", 160.0), lost, DONE)
    assert words == ["engine0 was lost and came back", "trainer had nothing to do for 75% of the time"]
