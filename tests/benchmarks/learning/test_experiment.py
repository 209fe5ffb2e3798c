import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.learning import experiment
from benchmarks.learning.arms import Arm, Setup
from benchmarks.learning.experiment import Plan, run

ROUTING_ARMS = {
    "routing/agreeing", "routing/tenth/replayed", "routing/tenth/free", "routing/half/replayed", "routing/half/free",
}  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    return Plan(lags=(0, 2), seeds=2, late=("mask",), late_seeds=1, lora_seeds=1, race=None, workers=1)


def test_the_short_form(plan: Plan, setup: Setup, tmp_path: Path) -> None:
    report = run(tmp_path / "learning.json", plan=plan, setup=setup, console=Console(quiet=True))
    assert json.loads((tmp_path / "learning.json").read_text())["headline"] == report["headline"]
    assert report["headline"] == {"auc_ratio_lora": report["arms"]["lora/0"]["area_ratio"]["mean"]}
    assert set(report["arms"]) == {"default/0", "default/2", "none/2", "tis/2", "late/mask", "lora/0"}
    assert report["arms"]["default/0"]["area_ratio"]["values"] == [1.0, 1.0]
    assert report["arms"]["default/2"]["staleness_mean"] == pytest.approx((0 + 1 + 6 * 2) / 8)
    assert len(report["curves"]) == 2 * 4 + 2
    for picture in ("staleness", "ratios", "late"):
        assert (tmp_path / f"learning-{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_headline_names_what_was_measured() -> None:
    arms = {"default/4": {"area_ratio": {"mean": 0.98}}}
    gains = {16: experiment.Estimate.of([0.1, 0.2, 0.3])}
    numbers = experiment.headline(arms, gains, {"ratio": 0.4})
    assert numbers["auc_ratio_staleness_4"] == 0.98
    assert numbers["correction_gain_sigmas_staleness_16"] == pytest.approx(0.2 / (0.1 / 3**0.5))
    assert numbers["time_to_target_ratio"] == 0.4


def test_a_lag_that_was_not_imposed_is_an_error(setup: Setup) -> None:
    with pytest.raises(RuntimeError, match="measured staleness 3.50, nominal 100"):
        experiment.run_job(Arm(name="a", lag=100), 0, setup)


def test_the_full_plan_has_every_arm_once_a_seed() -> None:
    jobs = list(experiment.FULL.jobs())
    names = [arm.name for arm, seed in jobs if seed == 0]
    assert names[:13] == [
        "default/0", "default/1", "none/1", "tis/1", "default/4", "none/4", "tis/4", "default/8", "none/8", "tis/8",
        "default/16", "none/16", "tis/16",
    ]  # fmt: skip
    assert names[13:] == ["late/mask", "late/wait", "late/drop", "late/correct", "lora/0"]
    assert len(jobs) == 13 * experiment.FULL.seeds + 4 * experiment.FULL.late_seeds + 5


def test_one_method_alone_runs_beside_the_synchronous_arm_only() -> None:
    jobs = list(experiment.PARTS["tis"].jobs())
    assert {arm.name for arm, _ in jobs} == {"default/0", "tis/1", "tis/4", "tis/8", "tis/16"}
    assert {seed for _, seed in jobs} == set(range(6))
    assert experiment.PARTS["tis"].race is None


def test_an_adapter_learns_beside_full_fine_tuning(setup: Setup) -> None:
    """Samples are drawn with the adapter of each version, which sampler and trainer agree on."""
    (arm,) = {arm.name: arm for arm, _ in experiment.PARTS["lora"].jobs() if arm.lora}.values()
    assert arm.lora is not None
    assert (arm.lora["rank"], arm.lag) == (8, 0)
    curve = experiment.run_job(arm, 0, setup)
    assert len(set(curve.rewards)) == len(curve.rewards)
    assert 0 < curve.logprob_gap_max < experiment.MAX_LOGPROB_GAP
    assert {arm.name for arm, _ in experiment.PARTS["lora"].jobs()} == {"default/0", "lora/0"}


def test_routers_that_err_are_measured_with_replay_and_without(
    setup: Setup, mixture: Path, tmp_path: Path
) -> None:
    plan = dataclasses.replace(experiment.PARTS["routing"], routing_seeds=1, workers=1)
    setup = dataclasses.replace(setup, model=str(mixture))
    report = run(tmp_path / "moe.json", plan=plan, setup=setup, console=Console(quiet=True))
    arms = report["arms"]
    assert set(arms) == ROUTING_ARMS
    assert arms["routing/agreeing"]["area_ratio"]["values"] == [1.0]
    assert set(report["headline"]) == {
        f"auc_ratio_{name.replace('/', '_')}" for name in ROUTING_ARMS - {"routing/agreeing"}
    }
    tenth, half = (arms[f"routing/{share}/replayed"]["routing"] for share in ("tenth", "half"))
    assert tenth["routing_replayed"] == half["routing_replayed"] == 1.0
    assert 0.02 < tenth["routing_flipped"] < half["routing_flipped"]
    assert half["routing_gap"] < 1e-5 < half["routing_gap_without"]
    assert arms["routing/half/free"]["routing"] == {}
    gaps = {curve["arm"]: curve["logprob_gap_max"] for curve in report["curves"]}
    assert max(gaps["routing/agreeing"], gaps["routing/half/replayed"]) < 1e-4
    assert gaps["routing/half/free"] > 1e-2
    assert (tmp_path / "moe-routing.png").read_bytes().startswith(b"\x89PNG")


def test_the_mixture_is_a_part_of_its_own() -> None:
    jobs = list(experiment.PARTS["routing"].jobs())
    assert {seed for _, seed in jobs} == set(range(5))
    assert {arm.name for arm, _ in jobs} == ROUTING_ARMS
    assert not any(arm.routers for arm, _ in experiment.FULL.jobs())


def test_truncated_importance_sampling_has_its_cap_and_no_other_correction() -> None:
    arms = {arm.name: arm for arm, _ in experiment.FULL.jobs()}
    config = arms["tis/4"].config()
    assert (config.loss, config.loss_args, config.corrections) == ("tis_reinforce", {"cap": 2.0}, {})


def test_one_method_alone_reports_and_draws(setup: Setup, tmp_path: Path) -> None:
    plan = dataclasses.replace(experiment.PARTS["tis"], lags=(0, 2), seeds=1, workers=1)
    report = run(tmp_path / "tis.json", plan=plan, setup=setup, console=Console(quiet=True))
    assert set(report["arms"]) == {"default/0", "tis/2"}
    assert report["correction_gain"] == report["headline"] == {}
    assert (tmp_path / "tis-ratios.png").read_bytes().startswith(b"\x89PNG")
