"""An environment of the real `verifiers`, in its own Python environment, through our front door: `make live-verifiers`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.demo.model import ToolRecipe
from penstock.demo.tool_start import make_tool_tokenizer
from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Episode, SamplingParams, Task
from penstock.rollout.command_workflow import CommandWorkflow
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import run_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.serve.agents.agent_server import AgentServer
from tests.verifiers_live.qwen_tokenizer import make_qwen_tokenizer

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "verifiers"


@pytest.fixture
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    given: str | None = request.config.getoption("--verifiers")
    if given is None:
        pytest.skip("needs --verifiers PYTHON (make live-verifiers)")
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
    """One episode of an environment (and options of its runner), in which the policy says this."""
    answers = iter(said)
    engine = ScriptedEngine(lambda request: [*tokenizer.encode(next(answers)), *tokenizer.stop_token_ids])
    door = AgentServer(engine, tokenizer, model=tokenizer.name, max_context=2048)
    await door.open()
    task = Task(id="sums-0", prompt="+", columns={"idx": 0})
    sampling = SamplingParams(max_tokens=128, stop_token_ids=tokenizer.stop_token_ids)
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


@pytest.mark.smoke
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("renderer", "call"),
    [
        # The default renderer writes the call again by the template, so the model must write as the template does.
        ("default tool_parser=qwen3", '{"name": "calculator_add", "arguments": {"a": 100, "b": 200}}'),
        # A renderer of the model's family goes on after the sampled tokens, whatever their spacing.
        ("qwen3", '{"name":"calculator_add",  "arguments":{"a":100,"b":200}}'),
    ],
    ids=["default", "qwen3"],
)
def test_a_tool_is_called_and_what_it_says_is_no_part_of_the_loss(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renderer: str, call: str
) -> None:
    tokenizer = make_qwen_tokenizer(tmp_path)
    monkeypatch.chdir(Path(__file__).parent)
    said = [f"<tool_call>\n{call}\n</tool_call>", "300"]
    episode = asyncio.run(play(python, tokenizer, f"added_sums --renderer {renderer}", said))
    assert (episode.failure, episode.message, episode.reward) == (None, "", 1.0)
    assert episode.rewrites == {}
    first, second = episode.turns
    assert second.parent == first.id
    (sample,) = episode.samples()
    prompt = first.prompt_ids.tolist()
    assert '"calculator_add"' in tokenizer.decode(prompt)
    call_ids, answer_ids = (tokenizer.encode(f"{text}<|im_end|>") for text in said)
    told = "\n<|im_start|>user\n<tool_response>\n300\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert sample.token_ids.tolist() == [*prompt, *call_ids, *tokenizer.encode(told), *answer_ids]
    assert sample.token_ids[sample.loss_mask].tolist() == [*call_ids, *answer_ids]


@pytest.mark.timeout(600)
def test_without_a_renderer_that_reads_calls_an_environment_with_tools_fails_and_says_so(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    episode = asyncio.run(play(python, make_qwen_tokenizer(tmp_path), "added_sums", ["300"]))
    assert episode.failure == "workflow_error"
    assert "DefaultRenderer does not support tools" in episode.message
