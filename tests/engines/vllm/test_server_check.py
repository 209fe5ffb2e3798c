import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.vllm.server_check import (
    check_experts,
    check_routes,
    check_sizes,
    check_tokenizer,
    describe,
    served_context,
    too_old,
)
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import UserError
from tests.engines.vllm.fake_server import FakeVllm


def ask_fake(fake: FakeVllm, folder: Path, question: Any) -> Any:
    async def main() -> Any:
        async with fake.served(folder / "s") as url, ServerClient("engine0", url) as client:
            return await question(client)

    return asyncio.run(main())


def test_a_server_with_everything_is_accepted(tmp_path: Path) -> None:
    ask_fake(FakeVllm(), tmp_path, check_routes)
    assert ask_fake(FakeVllm(max_context=77), tmp_path, served_context) == 77


@pytest.mark.parametrize(
    ("route", "sentence"),
    [
        ("/inference/v1/generate", "vLLM 0.25.1 at unix:.* is too old: it has no /inference/v1/generate"),
        ("/is_paused", "has its RL routes off: start it with VLLM_SERVER_DEV_MODE=1"),
        ("/weight_info", "vLLM 0.25.1 at unix:.* is too old: it has no /weight_info"),
        (
            "/update_weight_version",
            "vLLM 0.25.1 at unix:.* is too old: it has no /update_weight_version, and 0.32",
        ),
        ("/health", "is not healthy"),
    ],
)
def test_what_a_server_lacks_is_one_sentence(tmp_path: Path, route: str, sentence: str) -> None:
    fake = FakeVllm()
    fake.without = {route}
    with pytest.raises(UserError, match=sentence):
        ask_fake(fake, tmp_path, check_routes)


def test_a_flag_that_is_missing_is_named(tmp_path: Path) -> None:
    fake = FakeVllm()
    fake.forbidden = {"/inference/v1/generate"}
    with pytest.raises(UserError, match="has no /inference/v1/generate: start it with --enable-scale-out"):
        ask_fake(fake, tmp_path, check_routes)


def test_a_url_without_a_server_is_one_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        async with ServerClient("engine0", f"unix:{tmp_path / 'nobody'}") as client:
            await check_routes(client)

    with pytest.raises(UserError, match="there is no server at unix:.*; start it, or correct the URL"):
        asyncio.run(main())


def test_a_server_without_the_plugin_is_one_sentence(tmp_path: Path) -> None:
    fake = FakeVllm()
    fake.without = {"/collective_rpc"}
    with pytest.raises(UserError, match="does not know penstock: install penstock beside it"):
        ask_fake(fake, tmp_path, describe)


def test_a_server_without_the_backend_is_one_sentence(tmp_path: Path) -> None:
    fake = FakeVllm()
    fake.transfer = "nccl"
    with pytest.raises(
        UserError,
        match='through penstock.s plugin: .* --weight-transfer-config \'{"backend": "penstock"}',
    ):
        ask_fake(fake, tmp_path, describe)


@pytest.mark.parametrize(
    ("served", "trained", "sentence"),
    [
        ({"vocab_size": 14}, {"vocab_size": 15}, "its vocab_size is 14, and the trainer's is 15"),
        ({"vocab_size": 14, "hidden_size": 8}, {"vocab_size": 14, "hidden_size": 4}, "its hidden_size is 8"),
    ],
)
def test_another_model_is_one_sentence(
    served: dict[str, int], trained: dict[str, int], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check_sizes("http://host", served, trained, model="mine")


def test_sizes_that_one_side_does_not_know_are_not_compared() -> None:
    check_sizes("http://host", {"num_experts": 4}, {"num_experts": None}, model="mine")


def test_a_server_that_tells_no_experts_is_one_sentence() -> None:
    check_experts("http://a", {"returns_experts": True})
    with pytest.raises(UserError, match="start it with --enable-return-routed-experts"):
        check_experts("http://a", {"returns_experts": False})


def test_another_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    ask_fake(FakeVllm(), tmp_path, lambda client: check_tokenizer(client, [1, 2], model="mine"))
    with pytest.raises(UserError, match="another tokenizer than mine"):
        ask_fake(FakeVllm(), tmp_path, lambda client: check_tokenizer(client, [1, 3], model="mine"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("0.25.1", "0.25.1"),
        ("0.9.2", "0.9.2"),
        ("0.32.0+cpu", ""),
        ("1.0", ""),
        ("INFO hello\n0.31.9", "0.31.9"),
    ],
)
def test_a_version_below_the_needed_one_is_named(tmp_path: Path, said: str, found: str) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    assert asyncio.run(too_old(str(program))) == found


@pytest.mark.processes
def test_a_program_that_says_nothing_is_not_called_old(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert asyncio.run(too_old(str(program))) == ""
