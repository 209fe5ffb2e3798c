"""Kernels as the compiler makes them for a GPU, on a machine without one."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

pytest.importorskip("triton", reason="triton is not installed: pip install 'penstock[gpu]'")


def test_kernels_compile_for_a_gpu() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.engines.embedded.cuda.kernels.compiled"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["gate"]["ld.volatile"] == 3  # asked, opened, and opened again in the loop
    assert found["gate"]["fence.acq_rel.sys"] == 2
    assert found["gate"]["globaltimer"] == 2
    assert found["draw"]["ex2."] > 0
    assert found["decode, 1 splits, 2 heads together"]["mma."] > 0
    assert found["copy and fingerprint"]["ld.global.v4.b32"] > 0  # as wide as loads can be
    assert found["shrink"]["mma."] > 0
    assert found["shrink"]["cp.async"] > 0  # the next step is on its way
    assert found["expand"]["mma."] > 0
    assert found["expand"]["st.global.v4.b32"] > 0
    assert set(found) == {
        "shrink",
        "expand",
        "record, decoding",
        "record, prompts",
        "gate",
        "advance",
        "draw",
        "draw truncated",
        "draw from candidates",
        "narrow",
        "decode, 1 splits, 1 heads together",
        "decode, 1 splits, 2 heads together",
        "decode, 4 splits, 2 heads together",
        "copy and fingerprint",
    }
