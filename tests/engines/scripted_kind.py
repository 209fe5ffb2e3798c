"""The scripted engine as a kind by path."""

from penstock.config import Section
from penstock.engines.kinds import EngineKind, EngineParts
from penstock.engines.scripted import CAPABILITIES, ScriptedEngine


class ScriptedSettings(Section):
    num_tokens: int = 100
    urls: tuple[str, ...] = ()


async def open_scripted(parts: EngineParts) -> ScriptedEngine:
    ((policy, version),) = parts.versions.items()
    return ScriptedEngine(
        lambda request: range(parts.settings.num_tokens),
        name=parts.name,
        policy=policy,
        version=version,
        max_context=parts.config.max_context,
    )


SCRIPTED = EngineKind(opener=open_scripted, settings=ScriptedSettings, can=lambda section, lora: CAPABILITIES)
