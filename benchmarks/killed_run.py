"""What a kill costs a real run: how long until it trains again, and which share of its tokens is sampled again.

The controller of a generation-bound run is killed at random moments, and the run goes on from its folder. Of each
life it is known how many tokens it sampled (`benchmarks.killed_child`), and how many its journal keeps.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.api import cache_folder
from penstock.bench.chaos.run_audit import complaints_of
from penstock.bench.loop_settings import GENERATION_BOUND, GROUPS
from penstock.bench.saved_report import SavedReport
from penstock.bench.workload import make_model
from penstock.demo.model import ensure_builtin_model
from penstock.durability.durable_log import FOLDER
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.journal.replay import replay
from penstock.errors import UserError
from penstock.loop.attempt_records import EpisodeEnded, GroupScored, from_bytes
from penstock.records import WorkProgressed

KILLS = 5
STEPS = 10_000
"""More than all lives together reach."""
LIFE_S = (4.0, 12.0)
"""Between the begin of training and the kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledLife:
    """From one start to the kill."""

    start_s: float
    """From the start of the process until it trained."""
    num_sampled: int
    num_kept: int
    """Tokens that the journal had more when it was killed than when it was started."""
    complaints: tuple[str, ...] = ()
    """What an audit of its folder found after the kill."""


def run(report: SavedReport, console: Console, *, kills: int = KILLS, steps: int = STEPS) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        home, setting = Path(scratch), GENERATION_BOUND
        tokenizer = ensure_builtin_model(cache_folder(), log=console.print)
        model = make_model(home / "model", tokenizer, width=setting.width, layers=setting.layers)
        folder = home / "run"
        folder.mkdir()
        lives = []
        for _ in range(kills):
            lives.append(_live_and_die(model, folder, steps, rng.uniform(*LIFE_S)))
            report.put("kills", value=summed(lives))
            console.print(sentence(report.data["kills"]), highlight=False, soft_wrap=True)
    result = report.data["kills"]
    for line in result["complaints"]:
        console.print(line, highlight=False, soft_wrap=True)
    report.headline(headline(result, report.data.get("crashes", {})))


def headline(kills: dict[str, Any], crashes: dict[str, Any]) -> dict[str, Any]:
    """`violations` are those of both: of schedules in virtual time, and of real processes."""
    shown = {key: kills[key] for key in ("resume_s", "regenerated_fraction")}
    return {"violations": crashes.get("violations", 0) + len(kills["complaints"]), **shown}


def _live_and_die(model: Path, folder: Path, steps: int, kill_after_s: float) -> KilledLife:
    note, kept = folder / "note.json", tokens_kept(folder / FOLDER)
    words = {
        "model": str(model),
        "folder": str(folder),
        "note": str(note),
        "steps": steps,
        "kill_after_s": kill_after_s,
    }
    begun = time.time()
    command = [sys.executable, "-m", "benchmarks.killed_child", json.dumps(words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        raise UserError(f"a run that was to be killed ended by itself: {done.stdout[-2000:]}")
    said = json.loads(note.read_text())
    return KilledLife(
        start_s=said["training_at"] - begun,
        num_sampled=int(said["tokens"]),
        num_kept=tokens_kept(folder / FOLDER) - kept,
        complaints=tuple(complaints_of(folder, steps=None, groups_per_step=GROUPS)),
    )


def tokens_kept(journal: Path) -> int:
    """Sampled tokens that a journal holds, each once: of groups, episodes and turns that are not whole."""
    groups: dict[int, int] = {}
    episodes: dict[int, dict[int, int]] = {}
    turns: dict[tuple[int, int], dict[int, int]] = {}

    def look(data: bytes, segment: int) -> None:
        match record := from_bytes(data):
            case GroupScored():
                group = record.scored.group
                parts = (*group.episodes, *group.failures)
                groups[record.number] = sum(episode.num_output_tokens for episode in parts)
            case EpisodeEnded():
                tokens = record.episode.num_output_tokens
                episodes.setdefault(record.number, {})[record.episode.index] = tokens
            case WorkProgressed():
                for part in record.turns:
                    turns.setdefault((part.group, part.episode), {})[part.turn] = part.end

    if not journal.is_dir():
        return 0
    replay(DiskFiles(journal), look)
    for (number, index), ends in turns.items():
        episodes.setdefault(number, {}).setdefault(index, sum(ends.values()))
    for number, of_group in episodes.items():
        groups.setdefault(number, sum(of_group.values()))
    return sum(groups.values())


def summed(lives: Sequence[KilledLife]) -> dict[str, Any]:
    """The first start is none that goes on. A life that lost nothing has as many tokens kept as sampled."""
    lost = sum(max(0, life.num_sampled - life.num_kept) for life in lives)
    starts = [life.start_s for life in lives]
    return {
        "kills": len(lives),
        "start_s": starts[0],
        "resume_s": statistics.median(starts[1:] or starts),
        "regenerated_fraction": lost / max(1, sum(life.num_sampled for life in lives)),
        "complaints": [
            f"kill {number}: {one}" for number, life in enumerate(lives, 1) for one in life.complaints
        ],
        "lives": [
            {"start_s": life.start_s, "sampled": life.num_sampled, "kept": life.num_kept} for life in lives
        ],
    }


def sentence(result: dict[str, Any]) -> str:
    return (
        f"{result['kills']} kills: trains again {result['resume_s']:.1f} s after the start (the first start took "
        f"{result['start_s']:.1f} s); {result['regenerated_fraction']:.1%} of the tokens were sampled again; "
        f"{len(result['complaints'])} violations"
    )
