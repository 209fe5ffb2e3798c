import msgspec

from penstock.observe.writers.sample_rows import COLUMNS, as_text, sample_row, with_overview
from tests.observe.examples import SAMPLE
from tests.observe.hostile import HOSTILE


def test_the_numbers_that_matter_stand_together() -> None:
    assert with_overview({"reward": 1.0, "metric_7": 2.0}) == {
        "reward": 1.0,
        "metric_7": 2.0,
        "overview/reward": 1.0,
    }


def test_no_viewer_interprets_a_models_words() -> None:
    for text in HOSTILE:
        row = sample_row(msgspec.structs.replace(SAMPLE, prompt=f"{text}\n# heading", answer=text))
        assert len(row) == len(COLUMNS)
        shown = as_text([row])
        assert "\x1b" not in shown and "\u202e" not in shown
        assert all(line.startswith("    ") for line in shown.splitlines())
