"""Engines of every kind are opened by one function, and keep one contract."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.kinds import KINDS, EngineParts, ServedEngine, kind_of, open_engine, settings_of
from penstock.errors import ConfigError, UserError
from penstock.models.config import LoraConfig
from penstock.records import DEFAULT_POLICY
from penstock.records.interfaces import Engine
from tests.engines.contract import EngineContract
from tests.engines.embedded.tiny import NoWeights

SCRIPTED = "tests.engines.scripted_kind:SCRIPTED"


def parts_for(model: str, **section: Any) -> EngineParts:
    return EngineParts(
        name="engine7",
        model=model,
        device="cpu",
        config=EngineConfig(
            dtype="float32", max_context=64, embedded=EmbeddedConfig(kv_tokens=1024), **section
        ),
        receiver=NoWeights(),
        blobs=MemoryBlobs(),
        versions={DEFAULT_POLICY: 0},
    )


@asynccontextmanager
async def serving(engine: ServedEngine) -> AsyncIterator[Engine]:
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            await engine.close()


class TestEmbedded(EngineContract):
    @pytest.fixture(autouse=True)
    def _model(self, tiny_model: Path) -> None:
        self.model = str(tiny_model)

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with serving(await open_engine(parts_for(self.model))) as engine:
            yield engine


class TestScripted(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        opened = await open_engine(parts_for("", kind=SCRIPTED))
        async with serving(opened) as engine:
            yield engine


def test_an_engine_has_the_name_and_the_versions_that_it_was_given() -> None:
    async def main() -> None:
        engine = await open_engine(parts_for("", kind=SCRIPTED))
        report = await engine.report()
        assert (report.name, report.versions) == ("engine7", {DEFAULT_POLICY: 0})

    asyncio.run(main())


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="engine.kind must be embedded, vllm or the path of a kind of your own .*, got 'vlm'",
    ):
        EngineConfig(kind="vlm")
    with pytest.raises(ConfigError, match="got 'vlm'"):
        EngineConfig(beside={"vlm": 1})


def test_a_path_must_lead_to_a_kind() -> None:
    with pytest.raises(
        UserError, match="the engine kind 'tests.engines.test_kinds:SCRIPTED' must be a .*EngineKind"
    ):
        kind_of("tests.engines.test_kinds:SCRIPTED")


def test_settings_of_a_kind_by_path_are_checked_like_ours() -> None:
    assert parts_for("", kind=SCRIPTED, settings={SCRIPTED: {"num_tokens": 3}}).settings.num_tokens == 3
    wrong = parts_for("", kind=SCRIPTED, settings={SCRIPTED: {"num_token": 3}})
    with pytest.raises(ConfigError, match="unknown key 'num_token' in ScriptedSettings"):
        _ = wrong.settings


def test_a_kind_by_path_joins_a_server_for_each_url() -> None:
    section = EngineConfig(kind=SCRIPTED, settings={SCRIPTED: {"urls": ["http://a", "http://b"]}})
    assert [settings_of(each).urls for each in section.members] == [("http://a",), ("http://b",)]


def test_every_kind_has_a_section() -> None:
    assert set(KINDS) <= set(EngineConfig.model_fields)


@pytest.mark.parametrize("name", [*KINDS, SCRIPTED])
def test_what_a_kind_can_do_is_known_before_it_starts(name: str) -> None:
    section, lora = EngineConfig(kind=name), LoraConfig()
    assert {"logprobs", "versions"} <= set(kind_of(name).can(section, None))
    assert ("interrupt:inflight" in kind_of(name).can(section, lora)) == (name != "vllm")


@pytest.mark.processes
def test_kinds_are_known_without_what_they_need() -> None:
    code = "import sys; from penstock.engines.kinds import KINDS, kind_of; [kind_of(name) for name in KINDS]; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["mine.py:SHRT", "embedded"])
def test_settings_of_a_kind_that_is_not_used_are_refused(name: str) -> None:
    """A name that is mistyped would be a run with default settings."""
    sections = {"engine": {"kind": SCRIPTED, "settings": {name: {"num_tokens": 3}}}}
    with pytest.raises(
        ConfigError, match=rf"settings must be of kinds of your own that are used .* of {name}"
    ):
        build(PenstockConfig, sections)
