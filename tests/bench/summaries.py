"""A run's summary with the numbers that benches read."""

from penstock.run.summary import Summary


def make_summary(*, steps: int = 10, training_s: float = 5.0, trainer_worked: float = 0.5) -> Summary:
    return Summary(
        name="run",
        folder="run",
        steps=steps,
        samples=64 * steps,
        wall_s=2 * training_s,
        training_s=training_s,
        heldout_reward_start=None,
        heldout_reward_end=None,
        train_reward_end=0.75,
        trainer_time={
            "worked": trainer_worked,
            "waited": 0.5 * (1 - trainer_worked),
            "other": 0.5 * (1 - trainer_worked),
        },
        engine_time={"worked": 0.75, "waited": 0.125, "other": 0.125},
        tokens=1000 * steps,
        tokens_per_s=1000 * steps / training_s,
        staleness_mean=1.0,
        staleness_max=4.0,
        sync_stall_s=0.001,
        sync_stall_max_s=0.002,
        drops={},
        failures={},
        failed_checkpoints="",
        stopped_early=False,
    )
