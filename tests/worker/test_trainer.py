import asyncio

import pytest

from penstock.types import StepPlan, StepResult
from penstock.worker.trainer import TrainerService

PLAN = StepPlan(step=1, version=0, scores=(), micro_batches=(), num_loss_tokens=0, num_sequences=0)


class Publisher:
    def __init__(self):
        self.versions = []

    def snapshot(self, version, weights):
        self.versions.append(version)


class Trainer:
    def __init__(self, error=None):
        self.done = []
        self._error = error

    def weights(self):
        return {}

    def warm_up(self):
        self.done.append("warm-up")
        if self._error is not None:
            raise self._error

    def step(self, plan):
        self.done.append("step")
        return StepResult(step=plan.step, metrics={}, seconds={"forward": 1.0})


def test_steps_come_after_the_warm_up_and_each_ends_with_a_snapshot():
    trainer, publisher = Trainer(), Publisher()
    service = TrainerService(trainer, publisher, tokenizer=None)
    result = asyncio.run(service.step(PLAN))
    assert trainer.done == ["warm-up", "step"]
    assert publisher.versions == [0, 1]
    assert result.seconds.keys() == {"forward", "snapshot"}


def test_a_warm_up_that_failed_fails_the_first_step():
    trainer = Trainer(RuntimeError("no compiler here"))
    service = TrainerService(trainer, Publisher(), tokenizer=None)
    with pytest.raises(RuntimeError, match="no compiler here"):
        asyncio.run(service.step(PLAN))
    assert trainer.done == ["warm-up"]
