import sys

import pytest

from penstock.bench.child import ChildDied
from penstock.bench.sync.arm_runner import measure_all
from penstock.bench.sync.engine_beside import EngineBeside
from penstock.bench.sync.serving_process import Serving
from penstock.bench.sync.update_arm import Effort, UpdateArm

pytestmark = pytest.mark.processes


def test_an_engine_in_this_process_takes_every_selection() -> None:
    effort = Effort(shape="tiny", device="cpu", updates=1, warmup=1, rate_s=0.1)
    arms = [
        UpdateArm(transport="in_process", selection=selection, batch=2)
        for selection in ("full", "delta", "adapter")
    ]
    before = sys.getswitchinterval()
    found = dict(measure_all(arms, effort))
    assert list(found) == ["in process, full", "in process, delta", "in process, adapter of rank 16"]
    full, delta, adapter = found.values()
    assert full["bytes"] > adapter["bytes"] > 0
    assert delta["bytes"] < full["bytes"]
    assert all(arm["fresh_ms"] > arm["stall_ms"] > 0 for arm in found.values())
    assert sys.getswitchinterval() == before


def test_an_engine_that_ends_says_why() -> None:
    engine = EngineBeside(Serving(model="no such shape", device="cpu", batch=1), {})
    with pytest.raises(ChildDied, match="the engine ended: .*no such shape"):
        engine.ask(b"go")
    engine.close()
    engine.close()
