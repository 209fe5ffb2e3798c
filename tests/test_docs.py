"""What the docs show works: YAML is loaded, commands are parsed, Python is executed, in the page's order.

docs/api.md and docs/configuration.md are made from the source; the programs on api.md run in test_own_parts.py and
test_library.py, and the block of algorithms.md that needs a run of its own does too.
"""

import asyncio
import inspect
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from typer._click.exceptions import BadOptionUsage, MissingParameter, UsageError

import penstock
from benchmarks.__main__ import lab
from penstock.cli.main import app
from penstock.config.loader import build, load_config
from penstock.config.root import PenstockConfig
from penstock.errors import PenstockError
from penstock.planner.config import SimulatedConfig
from penstock.records import Task
from tests.scoring.groups import a_group
from tests.serve.live_server import serving

ROOT = Path(__file__).parent.parent
GENERATED = ("docs/api.md", "docs/configuration.md")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md"))
)
EXECUTED_ELSEWHERE = {("docs/algorithms.md", "import torch"): "test_own_parts.py trains with it"}
OF_OTHER_LIBRARIES = {("docs/coming-from.md", "# TRL"): "what somebody has who comes from TRL"}


class Block(NamedTuple):
    page: str
    line: int
    text: str

    @property
    def first(self) -> str:
        return self.text.split("\n", 1)[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str, pages: list[str] = PAGES) -> Iterator[Block]:
    """Those of one language; "" gives all."""
    for page in pages:
        text = (ROOT / page).read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if language in ("", found[1]):
                yield Block(page, text[: found.start()].count("\n") + 2, found[2])


@pytest.mark.parametrize("block", list(blocks("yaml")), ids=str)
def test_yaml_is_a_config(block: Block) -> None:
    build(PenstockConfig, yaml.safe_load(block.text))


def commands(page: str) -> Iterator[str]:
    """Lines of blocks that begin with `penstock`, without what the shell adds; and commands in the text, those of
    the lab among them."""
    for block in blocks("", [page]):
        for line in block.text.replace("\\\n", "").splitlines():
            if found := re.match(r"(?:\$ |\S+=\S+ )*(penstock [a-z].*)", line):
                yield found[1]
    text = (ROOT / page).read_text()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (
        " ".join(found.split())
        for found in re.findall(r"`((?:penstock|python -m benchmarks) [a-z][^`]*)`", outside)
    )


PLACEHOLDER = re.compile(r"…|\[-| \| |section\.key")
OVERRIDE = re.compile(r"[a-z_]+(\.\S+)?=")


def parse(command: str) -> None:
    """Raise where the command, an option or a key that it sets is not known, or a value is not of its type."""
    words = ["3" if word in ("N", "K", "S") else word for word in shlex.split(command.partition(" #")[0])[1:]]
    commands = app if words[0] != "-m" else lab
    words = words if commands is app else words[2:]
    context = typer.main.get_command(commands).make_context("penstock", list(words))
    while isinstance(context.command, typer.core.TyperGroup) and context._protected_args:
        name, found, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found is not None and name is not None
        context = found.make_context(name, rest, parent=context)
    if words[0] in ("train", "resume", "simulate", "eval", "serve"):
        root = SimulatedConfig if words[0] == "simulate" else PenstockConfig
        load_config(root, None, [word for word in words if OVERRIDE.match(word)])


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))])
def test_commands_are_parsed(page: str) -> None:
    wrong, text = [], " ".join((ROOT / page).read_text().split())
    for command in dict.fromkeys(commands(page)):
        if PLACEHOLDER.search(command):
            continue
        try:
            parse(command)
        except (MissingParameter, BadOptionUsage) as error:
            if f"`{command}`" not in text:  # the text may name a command or an option alone
                wrong.append(f"{command}: {error}")
        except (PenstockError, UsageError) as error:
            wrong.append(f"{command}: {error}")
    assert not wrong


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("penstock trian config.yaml", "No such command 'trian'"),
        ("penstock samples RUN --wurst 2", "No such option: --wurst"),
        ("penstock train rollout.groupsize=4", "unknown key"),
        ("penstock train config.yaml rollout.group_size=four", "rollout.group_size"),
        ("penstock simulate simulation.rank=4", "unknown key"),
        ("penstock bench sync --only", "--only"),
        ("python -m benchmarks learning --only nothing", "nothing"),
    ],
)
def test_a_wrong_command_is_seen(command: str, why: str) -> None:
    with pytest.raises((PenstockError, UsageError), match=re.escape(why)):
        parse(command)


def right_answers(task: Any, completion: str) -> float:
    return float(completion == task.columns["answer"])


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the models that the docs name are a tiny one, and in which a run has one step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    chat = shutil.copytree(tiny_model, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "models/my-model", "path/or/name"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(chat)
    rows = "".join(f'{{"prompt": "{a}+5=", "answer": "{a + 5}"}}\n' for a in range(40))
    (tmp_path / "tasks.jsonl").write_text(rows)
    train = penstock.train

    def one_step(*arguments: Any, **sections: Any) -> Any:
        rollout = {**sections.pop("rollout", {}), "max_new_tokens": 4, "groups_per_step": 2, "group_size": 2}
        return train(*arguments, **{**sections, "rollout": rollout, "steps": 1})

    monkeypatch.setattr(penstock, "train", one_step)
    return tmp_path


Names = dict[str, Any]
TASK = Task(id="t", prompt="2+2=", columns={"answer": "4", "reasoning_gym": {"name": "chain_sum"}})


def trained(names: Names) -> None:
    assert (Path("runs/run/model") / "config.json").is_file()


def says(**expected: object) -> Callable[[Names], None]:
    """Functions of the block, each called with what the page says that it gets."""
    calls: dict[str, Callable[[Any], Any]] = {
        "make": lambda make: list(make(3)),
        "reward": lambda reward: reward(TASK, " 4"),
        "harder_when_ready": lambda judge: judge(TASK, {"chain_sum": 0.2}),
        "correct": lambda correct: correct(TASK, " 4 "),
    }

    def check(names: Names) -> None:
        for name, value in expected.items():
            assert calls[name](names[name]) == value

    return check


def scores_steps(names: Names) -> None:
    (episode,) = a_group("4").episodes[:1]
    score = names["reward"](TASK, episode)
    assert (score.value, score.parts, len(score.steps)) == (1.5, {"right": 1.0}, 2)


def judges_all(names: Names) -> None:
    assert names["reward"](prompts=["", ""], completions=["is 4", "is 5"], answer=["4", "4"]) == [1.0, 0.0]


def is_a_workflow(name: str) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        assert inspect.iscoroutinefunction(names[name])
        assert list(inspect.signature(names[name]).parameters) == ["task", "rollout"]

    return check


GIVEN: Names = {
    "penstock": penstock,
    "rows": [{"prompt": f"{a}+5=", "answer": str(a + 5)} for a in range(20)],
    "heldout_rows": [{"prompt": "30+5=", "answer": "35"}],
    "reward": right_answers,
    "check": lambda text: float(text == "4"),
    "teacher_logprobs": lambda episode: [-1.0] * len(episode.turns[0].output_ids),
    "compute_score": lambda source, completion, truth: float(completion == truth),
    "model_on": lambda device: device,
    "score": lambda model, prompt, completion: 1.0,
    "run_in_sandbox": lambda text: {"output": text},
}
"""What the pages leave to the reader."""
CHECKS: dict[tuple[str, str], Callable[[Names], None]] = {
    ("README.md", "import penstock"): trained,
    ("docs/agents.md", "from openai import AsyncOpenAI"): is_a_workflow("solve"),
    (
        "docs/coming-from.md",
        '# Penstock; rows: dicts with a "prompt" and the columns that the reward needs',
    ): trained,
    ("docs/tasks-and-rewards.md", "def make(count):"): says(
        make=[{"prompt": f"What is {n} squared?", "answer": str(n * n)} for n in range(3)]
    ),
    ("docs/tasks-and-rewards.md", "def harder_when_ready(task, rewards):"): says(harder_when_ready=True),
    ("docs/tasks-and-rewards.md", "async def ask_again(task, rollout):"): is_a_workflow("ask_again"),
    ("docs/tasks-and-rewards.md", "async def solve(task, rollout):"): is_a_workflow("solve"),
    ("docs/tasks-and-rewards.md", "import numpy as np"): scores_steps,
    ("docs/tasks-and-rewards.md", "def reward(prompts, completions, answer, **kwargs):"): judges_all,
    ("docs/tasks-and-rewards.md", "import penstock"): trained,
    ("docs/tasks-and-rewards.md", "summary = penstock.train("): trained,
    ("docs/tutorial.md", "# rewards.py"): says(correct=1.0),
}
TO_EXECUTE = [
    block
    for block in blocks("python", [page for page in PAGES if page not in GENERATED])
    if (block.page, block.first) not in {**EXECUTED_ELSEWHERE, **OF_OTHER_LIBRARIES}
]
NEEDS_A_SERVER = "docs/serving.md"


def execute(code: str, path: Path) -> Names:
    """As a module of its own would be, so that workers find its functions."""
    path.write_text(code)
    names = {**GIVEN, "__name__": "__main__", "__file__": str(path)}
    exec(compile(code, str(path), "exec"), names)
    return names


@pytest.mark.processes
@pytest.mark.parametrize("block", [b for b in TO_EXECUTE if b.page != NEEDS_A_SERVER], ids=str)
def test_python_runs(block: Block, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = execute(block.text, place / "block.py")
    CHECKS.get((block.page, block.first), lambda names: None)(names)


def test_every_check_is_of_a_block() -> None:
    known = {(block.page, block.first) for block in blocks("python")}
    assert {*CHECKS, *EXECUTED_ELSEWHERE, *OF_OTHER_LIBRARIES} <= known


def test_a_client_reaches_the_server_as_the_page_says(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (block for block in TO_EXECUTE if block.page == NEEDS_A_SERVER)

    async def scene() -> None:
        async with serving(tiny_model) as live:
            code = block.text.replace("http://127.0.0.1:8000", live.address).replace('"builtin"', '"tiny"')
            assert code.count(live.address) == 1
            await asyncio.to_thread(execute, code, tmp_path / "client.py")

    asyncio.run(scene())
    assert re.fullmatch(r"[0-9+= ]*\n", capsys.readouterr().out)
