"""`penstock.train` from Python: a script, a notebook, a lambda."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import penstock
from penstock.api import run, run_in_thread, run_until_cancelled
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import UserError
from penstock.observe.status import RunStatus
from penstock.observe.views import SilentView
from penstock.run.summary import Summary

pytestmark = pytest.mark.processes

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(20)]
SMALL = {
    "rollout": {"max_new_tokens": 4, "groups_per_step": 2, "group_size": 4},
    "observe": {"view": "none"},
}


def test_public_names_are_these() -> None:
    assert penstock.__all__ == [
        "train",
        "train_async",
        "open_engine",
        "open_trainer",
        "Score",
        "ScoredGroup",
        "StepScore",
        "Task",
        "TokenColumn",
        "__version__",
    ]
    assert penstock.Task(id="a", prompt="p").is_chat is False


def test_a_lambda_is_scored_in_this_process_also_inside_a_running_loop(
    tiny_model: Path, tmp_path: Path
) -> None:
    """As in a notebook: a loop is running already, and the reward has no name."""
    seen: list[str] = []

    async def cell() -> Summary:
        return penstock.train(
            model=str(tiny_model),
            tasks=ROWS,
            reward=lambda task, completion: float(bool(seen.append(completion) or "7" in completion)),
            steps=2,
            run={"folder": str(tmp_path)},
            **SMALL,
        )

    summary = asyncio.run(cell())
    assert summary.steps == 2
    assert len(seen) >= 2 * 2 * 4
    assert Path(summary.folder, "model", "model.safetensors").is_file()


SCRIPT = """
import penstock

def reward(task, completion):
    return completion.count("7") / 4

summary = penstock.train(
    model={model!r}, tasks={rows!r}, reward=reward, steps=2, run={{"folder": {folder!r}}},
    rollout={{"max_new_tokens": 4, "groups_per_step": 2, "group_size": 4}}, observe={{"view": "none"}},
)
print("steps", summary.steps)
"""


@pytest.mark.full
def test_a_script_without_a_main_guard_trains_once(tiny_model: Path, tmp_path: Path) -> None:
    """The scoring worker loads the script for its reward; that must not start a second run."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(model=str(tiny_model), rows=ROWS, folder=str(tmp_path / "runs")))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "steps 2"
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["run"]
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["drops"] == {}


WORKFLOW = """
import os

import penstock

async def asks_twice(task, rollout):
    first = await rollout.generate(task.prompt)
    await rollout.generate(rollout.continue_(first, "+1="), max_tokens=2)
    with open({pids!r}, "a") as file:
        print(os.getpid(), file=file)
    if rollout.spec.index == 3:
        raise RuntimeError("a tool broke")

def reward(task, episode):
    assert len(episode.turns) == 2
    return episode.text.count("7") + 0.1 * episode.index

summary = penstock.train(
    model={model!r}, tasks={rows!r}, reward=reward, workflow=asks_twice, steps=2, run={{"folder": {folder!r}}},
    rollout={{"max_new_tokens": 4, "groups_per_step": 2, "group_size": 4, "workers": 2}},
    observe={{"view": "none"}},
)
print(os.getpid(), summary.steps, summary.samples, summary.failures["workflow_error"] >= 4, summary.drops)
"""


@pytest.mark.full
def test_a_workflow_of_a_script_runs_in_processes_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """Episode 3 of every group fails: it costs itself, and the others train."""
    script, pids = tmp_path / "mine.py", tmp_path / "pids"
    names = {"model": str(tiny_model), "folder": str(tmp_path / "runs"), "pids": str(pids)}
    script.write_text(WORKFLOW.format(rows=ROWS, **names))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    own, *told = done.stdout.splitlines()[-1].split(maxsplit=4)
    assert told == ["2", "12", "True", "{}"]
    assert len(set(pids.read_text().split()) - {own}) == 2


@pytest.mark.full
def test_a_workflow_without_a_name_runs_in_this_process(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    async def closure(task: penstock.Task, rollout: Any) -> None:
        turn = await rollout.generate(task.prompt)
        seen.append(len(turn.output_ids))

    summary = penstock.train(
        model=str(tiny_model),
        tasks=ROWS,
        reward=lambda task, completion: float("7" in completion),
        workflow=closure,
        steps=1,
        run={"folder": str(tmp_path)},
        observe={"view": "none"},
        rollout={**SMALL["rollout"], "workers": 1},
    )
    assert summary.steps == 1
    assert len(seen) >= 2 * 4


def test_a_section_that_is_no_section_is_refused(tiny_model: Path) -> None:
    with pytest.raises(penstock.errors.UserError, match="rollout must be a section such as"):  # type: ignore[attr-defined]
        penstock.train(model=str(tiny_model), tasks=ROWS, reward="a:b", rollout=4)  # type: ignore[arg-type]


def test_a_run_shows_itself_before_anything_is_read_and_gives_the_terminal_back() -> None:
    class Watched(SilentView):
        closed = False

        def update(self, status: RunStatus) -> None:
            self.lines.append(status.phase)

        def close(self) -> None:
            self.closed = True

    view = Watched()
    config = build(PenstockConfig, {"tasks": {"source": "not-there.jsonl"}})
    with pytest.raises(UserError, match="not-there"):
        run(config, view)
    assert view.lines == ["starting: reading tasks and tokenizer"]
    assert view.closed


@pytest.mark.full
def test_all_that_can_be_said_in_python_beside_a_running_loop(tiny_model: Path, tmp_path: Path) -> None:
    """The loop goes on while it trains; held-out rows and weighted rewards reach the run; limit holds for rows."""
    prompts: set[str] = set()

    def sevens(task: penstock.Task, completion: str) -> float:
        prompts.add(str(task.prompt))
        return float(completion.count("7"))

    async def program() -> tuple[Summary, int]:
        ticks, running = (
            0,
            asyncio.create_task(
                penstock.train_async(
                    model=str(tiny_model),
                    tasks={"rows": ROWS, "limit": 2},
                    eval_tasks=[{"prompt": "99+1=", "answer": "100"}],
                    reward={"sevens": (sevens, 0.0), "one": (lambda task, completion: 1.0, 3.0)},
                    steps=1,
                    run={"folder": str(tmp_path)},
                    algorithm={"advantage": "reinforce_pp"},
                    **SMALL,
                )
            ),
        )
        while not running.done():
            ticks += 1
            await asyncio.wait({running}, timeout=0.05)
        return running.result(), ticks

    summary, ticks = asyncio.run(program())
    assert summary.steps == 1
    assert summary.heldout_reward_start == summary.heldout_reward_end == summary.train_reward_end == 3.0
    assert prompts == {"0+1=", "1+1=", "99+1="}
    assert ticks > 10


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """As in a terminal or a notebook; in a shell's background jobs they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SUMMARY = cast(Summary, object())


class StoppableRun:
    """Interrupts as often as it is told, each time after the answer to the last one, and ends when `until` is asked."""

    has_begun = True
    waits_for_room = False

    def __init__(self, until: str, interrupts: int = 0) -> None:
        self.asked: list[str] = []
        self.saved = False
        self._until = until
        self._interrupts = interrupts

    async def run(self) -> Summary:
        self._loop = asyncio.get_running_loop()
        self._answered = asyncio.Event()
        while self._until not in self.asked:
            if self._interrupts > len(self.asked):
                os.kill(os.getpid(), signal.SIGINT)
            await self._answered.wait()
            self._answered.clear()
        self.saved = True
        return SUMMARY

    def stop(self) -> None:
        self._ask("stop")

    def cancel(self) -> None:
        self._ask("cancel")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        self._loop.call_soon_threadsafe(self._answered.set)


@pytest.mark.parametrize(("until", "asked"), [("stop", ["stop"]), ("cancel", ["stop", "cancel"])])
def test_an_interrupted_caller_gets_the_summary(until: str, asked: list[str]) -> None:
    one, lines = StoppableRun(until, interrupts=3), list[str]()
    assert run_in_thread(one, lines.append) is SUMMARY
    assert one.asked == asked
    assert [line.split(":")[0] for line in lines] == ["Ctrl-C"] * len(asked)


def test_the_third_interrupt_ends_it() -> None:
    one = StoppableRun("never", interrupts=3)
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(one, lambda line: None)
    assert (one.asked, one.saved) == (["stop", "cancel"], False)


def test_an_error_of_the_run_is_the_callers() -> None:
    class Broken(StoppableRun):
        async def run(self) -> Summary:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_in_thread(Broken("stop"), lambda line: None)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run_until_cancelled(Broken("stop")))


@pytest.mark.parametrize(("until", "times", "saved"), [("cancel", 1, True), ("never", 2, False)])
def test_a_cancelled_task_saves_first_unless_it_is_cancelled_again(
    until: str, times: int, saved: bool
) -> None:
    one = StoppableRun(until)

    async def main() -> None:
        task = asyncio.create_task(run_until_cancelled(one))
        await asyncio.sleep(0)
        for _ in range(times):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (one.asked, one.saved) == (["cancel"], saved)
