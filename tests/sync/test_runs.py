"""Whole runs over each transport: real processes, two engines, and both serve the last version when it ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.records import Interrupt, UpdateReceipt, WeightUpdate
from penstock.run.workers import LaunchedEngine

pytestmark = pytest.mark.processes

STEPS = 4


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str, int]]:
    """Engine, transport, selection and version of every update that was acknowledged. Engines acknowledge what they
    have verified by its fingerprint, and nothing else."""
    found: list[tuple[str, str, str, int]] = []
    begin = LaunchedEngine.__init__

    def init(self: LaunchedEngine, *arguments: Any) -> None:
        begin(self, *arguments)
        update_engine = self.calls.update

        async def update(update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
            receipt = await update_engine(update, interrupt)
            found.append((self.name, update.transport, update.selection, receipt.version))
            return receipt

        self.calls.update = update  # type: ignore[method-assign]

    monkeypatch.setattr(LaunchedEngine, "__init__", init)
    return found


REST = (
    ("filesystem", "delta"),
    ("http", "delta"),
    ("http", "full"),
    ("collective", "delta"),
    ("filesystem", "adapter"),
    ("http", "adapter"),
    ("collective", "adapter"),
)


@pytest.mark.parametrize(
    ("transport", "selection"),
    [
        ("shared_memory", "delta"),
        ("collective", "full"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in REST),
    ],
)
def test_every_engine_serves_the_last_version(
    transport: str,
    selection: str,
    taken: list[tuple[str, str, str, int]],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}+{a + 3}=", "answer": str(a)} for a in range(10, 40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def sevens(task, completion):\n    return completion.count('7') / 8\n"
    )
    weights = tmp_path / "weights"
    chosen = [f"sync.selection={selection}", "sync.anchor_every=3"]
    if selection == "adapter":
        pytest.importorskip("peft", reason="peft is not installed: pip install 'penstock[lora]'")
        chosen = ["model.lora.rank=2"]
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "train",
                f"model.name={tiny_model}",
                "tasks.source=tasks.jsonl",
                "reward.functions=rewards.py:sevens",
                "rollout.max_new_tokens=4",
                "rollout.groups_per_step=2",
                "engine.count=2",
                f"run.steps={STEPS}",
                "staleness.max_staleness=0",  # so that no version is skipped for a newer one
                f"sync.transport={transport}",
                *chosen,
                f"sync.folder={weights if transport == 'filesystem' else ''}",
            ]
        )
    assert ended.value.code == 0
    selections = {
        "full": ["full"] * 5,
        "delta": ["full", "delta", "delta", "full", "delta"],
        "adapter": ["full", *["adapter"] * 5],  # of the weights below it, then it
    }[selection]
    expected = [(transport, sent, version) for version, sent in enumerate(selections)]
    for engine in ("engine0", "engine1"):
        assert [update for name, *update in taken if name == engine] == [list(each) for each in expected]
    assert not weights.exists() or list(weights.iterdir()) == []
