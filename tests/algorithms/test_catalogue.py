import subprocess
import sys

import pytest

from penstock.algorithms.catalogue import describe

pytestmark = pytest.mark.processes


def test_every_entry_has_a_line_a_formula_and_a_source():
    entries = describe()
    assert len(entries) == 9 + 14 + 6 + 3 + 4
    assert {entry.kind for entry in entries} == {
        "advantage",
        "loss",
        "correction",
        "kl_estimator",
        "selection",
    }
    for entry in entries:
        assert entry.summary.endswith("."), entry.name
        assert len(entry.summary) < 110, entry.name
    clip = next(entry for entry in entries if entry.name == "clip")
    assert clip.parameters == {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 10.0}


def test_describing_needs_no_torch():
    code = "import sys, penstock.algorithms.catalogue as c; c.describe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
