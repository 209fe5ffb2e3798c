"""The examples of library entrances run, and what they refuse."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import UserError
from tests.test_own_parts import blocks

EXAMPLES = Path(__file__).parent.parent / "examples" / "library"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"library_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_read_at_a_glance() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lines) == 4 and max(lines.values()) <= 40, lines


def test_an_engine_alone_answers(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(example("engine_alone").main())
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("=")[0] for line in lines] == ["100+214", "221+214", "357+214", "401+214"]
    assert all(line.endswith("versions {0}") for line in lines)


def test_trainer_steps_alone_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = asyncio.run(example("trainer_alone").main())
    lines = capsys.readouterr().out.splitlines()
    served = [line for line in lines if "serves version" in line]
    assert len(rewards) == 10 and served[-1].endswith("serves version 10")
    assert sum(rewards[-3:]) > 1.2 * sum(rewards[:3]) > 0


def test_the_gate_alone_keeps_the_bound() -> None:
    ages = asyncio.run(example("gate_alone").main(steps=20))
    assert len(ages) == 20 and 0 < max(ages) <= 2


def test_the_gate_needs_no_torch() -> None:
    code = (
        "import asyncio, sys, gate_alone; asyncio.run(gate_alone.main(3)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLES)


def test_the_program_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("api.md", "A part alone", "python")[:1]
    exec(compile(program, "docs/api.md", "exec"), {})
    assert "'reward_mean': " in capsys.readouterr().out


def test_weights_travel_between_two_processes() -> None:
    assert asyncio.run(example("sync_alone").main(steps=2)) == [1, 2]


def test_an_adapter_alone_is_trained_and_served(tiny_model: Path) -> None:
    lora = {"rank": 4}

    async def scene() -> tuple[int, np.ndarray, np.ndarray, int]:
        async with (
            penstock.open_engine(str(tiny_model), lora=lora, max_context=64) as engine,
            penstock.open_trainer(str(tiny_model), lora=lora, learning_rate=1e-2) as trainer,
        ):
            prompt = [1, 2, 3]
            before = await engine.answer(prompt, max_tokens=8, temperature=0)
            answers = [await engine.answer(prompt, max_tokens=8, seed=seed) for seed in range(4)]
            await trainer.step([penstock.ScoredGroup.of(answers, [0, 1, 0, 1])])
            async with trainer.published() as update:
                receipt = await engine.update(update)
            after = await engine.answer(prompt, max_tokens=8, temperature=0)
            return receipt.version, before.logprobs, after.logprobs, int(after.versions[0])

    version, before, after, sampled_by = asyncio.run(scene())
    assert (version, sampled_by) == (2, 2)  # 0 is what is below the adapter, 1 the adapter as it began
    assert not np.array_equal(before, after)


def test_threads_of_the_callers_process_are_the_callers(tiny_model: Path) -> None:
    async def scene() -> None:
        async with (
            penstock.open_engine(str(tiny_model), max_context=64),
            penstock.open_trainer(str(tiny_model)),
        ):
            pass

    before = torch.get_num_threads()
    asyncio.run(scene())
    assert torch.get_num_threads() == before


def test_what_can_not_be_replayed_is_refused(tiny_model: Path) -> None:
    async def scene(**sampling: Any) -> None:
        async with penstock.open_engine(str(tiny_model), max_context=64) as engine:
            answers = [await engine.answer([1, 2, 3], max_tokens=4, **sampling) for _ in range(2)]
        async with penstock.open_trainer(str(tiny_model)) as trainer:
            await trainer.step([penstock.ScoredGroup.of(answers, [0.0, 1.0])])

    with pytest.raises(UserError, match=r"must be drawn with top_k=0, top_p=1 and min_p=0, got 0, 0.5 and 0"):
        asyncio.run(scene(top_p=0.5))
    with pytest.raises(UserError, match="can't be sampled with presence_penalty"):
        asyncio.run(scene(presence_penalty=0.5))


def test_an_error_of_the_callers_comes_as_it_is(tiny_model: Path) -> None:
    async def scene() -> None:
        async with penstock.open_engine(str(tiny_model), max_context=64):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(scene())
    with pytest.raises(UserError, match="unknown key 'max_contex' in EngineConfig"):
        asyncio.run(penstock.open_engine(str(tiny_model), max_contex=64).__aenter__())


def test_after_a_step_that_failed_the_weights_count_as_those_before_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def fails(tokens):\n    raise ArithmeticError('too steep')\n")

    async def scene() -> tuple[list[int], int, int]:
        async with penstock.open_engine(str(tiny_model), max_context=64) as engine:
            answers = [await engine.answer([1, 2, 3], max_tokens=4, seed=seed) for seed in range(2)]
        algorithm = {"loss": f"{tmp_path}/mine.py:fails"}
        async with penstock.open_trainer(str(tiny_model), algorithm=algorithm) as trainer:
            with pytest.raises(UserError, match="ArithmeticError: too steep"):
                await trainer.step([penstock.ScoredGroup.of(answers, [0.0, 1.0])])
            async with trainer.published() as update:
                return list(trainer.history.steps), trainer.num_steps, update.version

    assert asyncio.run(scene()) == ([0, 0], 0, 1)
