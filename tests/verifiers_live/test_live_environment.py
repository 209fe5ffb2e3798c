"""An environment of the real `verifiers`, in its own Python environment, through our front door: `make test-verifiers`."""

import asyncio
from pathlib import Path

import pytest

from penstock.demo.model import ToolRecipe
from penstock.demo.tool_start import make_tool_tokenizer
from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.rollout.command_workflow import CommandWorkflow
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import run_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.serve.agents.front_door import FrontDoor
from penstock.types import Episode, SamplingParams, Task

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "verifiers"


@pytest.fixture
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    given: str | None = request.config.getoption("--verifiers")
    if given is None:
        pytest.skip("needs --verifiers PYTHON (make test-verifiers)")
    python = Path(given).absolute()
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    # The chat loop of verifiers installs its packages when it is first started: from here, without a network.
    monkeypatch.setenv("UV_DEFAULT_INDEX", (python.parent.parent / "wheels").as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(python.parent.parent / "uv-cache"))
    monkeypatch.setenv("UV_PYTHON", str(python))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.chdir(EXAMPLE)
    return python


@pytest.mark.timeout(600)  # uv installs what the chat loop of verifiers needs, once
def test_it_runs_as_it_is_and_asks_for_the_tokens_that_the_template_writes(
    python: Path, tmp_path: Path
) -> None:
    make_tool_tokenizer(ToolRecipe()).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = ChatTokenizer(str(tmp_path))
    answers = iter(["300", "301"])

    async def main() -> list[Episode]:
        engine = ScriptedEngine(lambda request: [*tokenizer.encode(next(answers)), *tokenizer.stop_token_ids])
        door = FrontDoor(engine, tokenizer, model=str(tmp_path), max_context=256)
        await door.open()
        episodes = []
        for index in range(2):
            task = Task(id="sums-0", prompt="+", columns={"idx": 0})
            sampling = SamplingParams(max_tokens=12, stop_token_ids=tokenizer.stop_token_ids)
            spec = EpisodeSpec(group=0, index=index, task=task, sampling=sampling, timeout_s=280)
            rollout = Rollout(spec, engine, tokenizer)
            endpoint = door.admit(rollout)
            workflow = CommandWorkflow(f"{python} run_environment.py sums")
            episodes.append(await run_episode(workflow, rollout))
            door.dismiss(endpoint)
        await door.close()
        return episodes

    right, wrong = asyncio.run(main())
    assert [(episode.failure, episode.message) for episode in (right, wrong)] == [(None, "")] * 2
    assert [(episode.reward, episode.text) for episode in (right, wrong)] == [(1.0, "300"), (0.0, "301")]
    expected = tokenizer.encode_chat([{"role": "user", "content": "100+200="}])
    assert [turn.prompt_ids.tolist() for turn in (*right.turns, *wrong.turns)] == [expected] * 2
