"""An environment of the real `verifiers`, in its own Python environment, through our front door: `make test-verifiers`."""

import asyncio
from collections.abc import Sequence
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


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    make_tool_tokenizer(ToolRecipe()).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return ChatTokenizer(str(tmp_path))


async def play(python: Path, tokenizer: ChatTokenizer, environment: str, said: Sequence[str]) -> Episode:
    """One episode of an environment, in which the policy says this."""
    answers = iter(said)
    engine = ScriptedEngine(lambda request: [*tokenizer.encode(next(answers)), *tokenizer.stop_token_ids])
    door = FrontDoor(engine, tokenizer, model=tokenizer.name, max_context=256)
    await door.open()
    task = Task(id="sums-0", prompt="+", columns={"idx": 0})
    sampling = SamplingParams(max_tokens=12, stop_token_ids=tokenizer.stop_token_ids)
    spec = EpisodeSpec(group=0, index=0, task=task, sampling=sampling, timeout_s=280)
    rollout = Rollout(spec, engine, tokenizer)
    endpoint = door.admit(rollout)
    try:
        workflow = CommandWorkflow(f"{python} {EXAMPLE / 'run_environment.py'} {environment}")
        return await run_episode(workflow, rollout)
    finally:
        door.dismiss(endpoint)
        await door.close()


@pytest.mark.timeout(600)  # uv installs what the chat loop of verifiers needs, once
def test_it_runs_as_it_is_and_asks_for_the_tokens_that_the_template_writes(
    python: Path, tokenizer: ChatTokenizer
) -> None:
    right, wrong = (asyncio.run(play(python, tokenizer, "sums", [said])) for said in ("300", "301"))
    assert [(episode.failure, episode.message) for episode in (right, wrong)] == [(None, "")] * 2
    assert [(episode.reward, episode.text) for episode in (right, wrong)] == [(1.0, "300"), (0.0, "301")]
    expected = tokenizer.encode_chat([{"role": "user", "content": "100+200="}])
    assert [turn.prompt_ids.tolist() for turn in (*right.turns, *wrong.turns)] == [expected] * 2


@pytest.mark.timeout(600)
def test_an_environment_with_a_class_of_its_own_is_one_sequence_over_its_turns(
    python: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns with a role of another name: the second goes on after the tokens of the first."""
    monkeypatch.chdir(Path(__file__).parent)
    episode = asyncio.run(play(python, tokenizer, "chained_sums", ["300", "405"]))
    assert (episode.failure, episode.message, episode.reward) == (None, "", 1.0)
    assert [turn.text for turn in episode.turns] == ["300", "405"]
    assert episode.turns[1].parent == episode.turns[0].id
    assert episode.rewrites == {}
    (sample,) = episode.samples()
    assert tokenizer.decode(sample.token_ids[sample.loss_mask].tolist()) == "300405"
    assert tokenizer.decode(sample.token_ids.tolist()) == "100+200=300300+105=405"
