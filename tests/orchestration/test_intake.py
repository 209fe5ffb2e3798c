import asyncio

import pytest

from penstock.buffer.admission import StalenessGate
from penstock.buffer.history import VersionHistory
from penstock.buffer.rollout_buffer import RolloutBuffer
from penstock.errors import UserError
from penstock.orchestration.intake import Intake
from tests.buffer.test_admission import scored


def buffer() -> RolloutBuffer:
    history = VersionHistory(steps=[0])
    return RolloutBuffer(
        StalenessGate(groups_per_step=1, max_staleness=4, late="correct", ahead=9, history=history)
    )


def test_a_group_that_selection_keeps_waits_for_its_step() -> None:
    async def main() -> None:
        one = buffer()
        intake = Intake(one, {})
        assert await intake.take(await one.admit(), scored(0, [0, 0])) is None
        assert await intake.take(await one.admit(), scored(1, [])) == "empty"
        taken = await one.take_step()
        assert taken.groups[0].samples[0][0].num_loss_tokens == 2

    asyncio.run(main())


def test_what_selection_leaves_out_is_dropped_for_its_reason() -> None:
    async def main() -> None:
        one = buffer()
        intake = Intake(one, {"zero_variance": {}}, max_filtered_in_a_row=2)
        assert await intake.take(await one.admit(), scored(0, [0])) == "zero_variance"
        assert (one.gate.num_running, one.gate.num_ready) == (0, 0)
        await intake.take(await one.admit(), scored(1, [0]))
        with pytest.raises(UserError, match="the last 2 groups were all dropped by selection"):
            await one.take_step()

    asyncio.run(main())
