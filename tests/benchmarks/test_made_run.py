from pathlib import Path

from benchmarks.made_run import write_made_run
from penstock.observe.reading.run_reading import RunReading


def test_a_made_run_reads_like_a_real_one(tmp_path: Path) -> None:
    run = RunReading(write_made_run(tmp_path / "made", steps=30, samples_per_step=4, tokens_per_answer=20))
    run.refresh()
    assert (len(run.steps), len(run.samples), len(run.drops)) == (30, 123, 3)
    assert run.samples.read(0).prompt == "What comes after 1?"
    (trace,) = run.tokens(30, 30, 0)
    assert len(trace.texts) == 20 and trace.texts[0].startswith(" ")
    assert set(trace.versions.tolist()) == {28, 29}
    assert [one.process for one in run.time_sheet()] == ["trainer", "engine0"]
    assert run.status().last_sample is not None
