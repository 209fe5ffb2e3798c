"""Which tokens count as kept, and what kills amount to."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.killed_run import KilledLife, headline, sentence, summed, tokens_kept
from penstock.durability.durable_log import open_log
from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import EpisodeEnded, GroupAdmitted, scored_record
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import TurnPart, WorkProgressed
from tests.records.builders import scored
from tests.records.test_partial_work import part


def of_group(number: int, one: TurnPart) -> TurnPart:
    return msgspec.structs.replace(one, group=number)


def test_each_token_of_the_journal_counts_once(tmp_path: Path) -> None:
    async def inline(write: Callable[[], None]) -> None:
        write()

    async def scene() -> None:
        async with open_log(tmp_path / "journal", progress_s=2, in_thread=inline) as log:
            for number in range(3):
                ticket = Ticket(number=number, bound=1, deadline=1)
                await log.append(
                    GroupAdmitted(ticket=ticket, task_id=f"t{number}", prompt="p", num_taken=number + 1)
                )
                log.append(WorkProgressed(turns=(of_group(number, part(0, 1, 2)),)))
                await asyncio.sleep(3)
                log.append(WorkProgressed(turns=(of_group(number, part(2, 3)),)))
                await asyncio.sleep(3)
            for number in range(2):
                group = scored(number, [0] * 5)
                log.append(EpisodeEnded(number=number, episode=group.group.episodes[0]))
                await log.durable()
            await log.append(scored_record(0, scored(0, [0] * 5), None))

    assert tokens_kept(tmp_path / "journal") == 0
    run_in_virtual_time(scene())
    assert tokens_kept(tmp_path / "journal") == 5 + 5 + 3


def test_the_first_start_is_none_that_goes_on() -> None:
    lives = [
        KilledLife(start_s=9.0, num_sampled=100, num_kept=90),
        KilledLife(start_s=11.0, num_sampled=60, num_kept=62),
        KilledLife(start_s=12.0, num_sampled=40, num_kept=30),
    ]
    result = summed(lives)
    assert (result["start_s"], result["resume_s"]) == (9.0, 11.5)
    assert result["regenerated_fraction"] == 0.1
    assert sentence(result) == (
        "3 kills: trains again 11.5 s after the start (the first start took 9.0 s); 10.0% of the tokens were sampled "
        "again; 0 violations"
    )


def test_what_an_audit_finds_after_a_kill_is_a_violation() -> None:
    lives = [
        KilledLife(start_s=9.0, num_sampled=1, num_kept=1),
        KilledLife(start_s=9.0, num_sampled=1, num_kept=1, complaints=("11 groups were consumed",)),
    ]
    result = summed(lives)
    assert result["complaints"] == ["kill 2: 11 groups were consumed"]
    assert sentence(result).endswith("; 1 violations")
    shown = headline(result, {"violations": 2})
    assert shown == {"violations": 3, "resume_s": 9.0, "regenerated_fraction": 0.0}
    assert headline(result, {})["violations"] == 1
