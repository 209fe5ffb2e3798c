"""Imposed staleness: every group of a step is sampled with weights that are `lag` updates old."""

from benchmarks.learning.arms import Arm, Curve, Setup
from benchmarks.learning.bed import MICRO_BATCH_TOKENS, TestBed, scored
from penstock.trainer.step.packing import plan_step


def run_lagged(arm: Arm, seed: int, setup: Setup) -> Curve:
    """One run. In its first `lag` steps there are no weights that old: the starting ones are used."""
    bed = TestBed(arm, seed, setup, keep=arm.lag + 1)
    for step in range(1, setup.steps + 1):
        first = (step - 1) * setup.groups
        tasks = [(first + index, bed.stream.next()) for index in range(setup.groups)]
        version = max(0, bed.version - arm.lag)
        groups = scored(bed.sampler.sample(tasks, [version] * bed.max_tokens))
        plan = plan_step(step, groups, micro_batch_tokens=MICRO_BATCH_TOKENS)[0]
        bed.train(plan, step)
    return bed.curve()
