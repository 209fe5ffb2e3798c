"""`penstock trace` in Perfetto's own engine, offline."""

import asyncio
from pathlib import Path

from benchmarks.made_run import write_made_run
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.trace.run_trace import write_trace
from tests.browser.perfetto_ui import opened_trace, query

STEPS, SPANS = 200, 10


def test_every_slice_and_arrow_arrives_without_an_error(browser: int, tmp_path: Path) -> None:
    run = RunReading(write_made_run(tmp_path / "made", steps=STEPS, spans_per_step=SPANS))
    run.refresh()
    report = write_trace(run)

    async def main() -> None:
        async with opened_trace(browser, report.path) as page:
            (slices,) = await query(page, "select count(*) as n, sum(dur < 0) as endless from slice")
            (flows,) = await query(page, "select count(*) as n from flow")
            (arrows,) = await query(
                page,
                "select count(*) as n from flow join slice a on a.id = flow.slice_out join slice b on b.id = "
                "flow.slice_in where a.name = 'generate' and b.name glob 'step *' and a.ts < b.ts + b.dur",
            )
            (counters,) = await query(page, "select count(*) as n from counter")
            (tracks,) = await query(page, "select count(distinct track_id) as n from slice")
            errors = await query(
                page,
                "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
            )
            processes = await query(page, "select name from process where name is not null order by name")
        assert slices == {"n": str(report.num_slices), "endless": "0"}
        assert report.num_slices == STEPS * (SPANS + 2)
        assert int(arrows["n"]) == STEPS * SPANS
        assert int(flows["n"]) == report.num_flows == STEPS * (SPANS + 1)
        assert int(counters["n"]) >= STEPS * 2
        assert tracks["n"] == "6"
        assert errors == []
        assert [row["name"] for row in processes] == ["engine0", "trainer"]

    asyncio.run(main())
