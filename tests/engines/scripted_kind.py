"""The scripted engine as a kind: what `open_engine` finds when a test gives it these kinds."""

from penstock.engines.kinds import EngineParts
from penstock.engines.scripted import ScriptedEngine

KINDS = {"scripted": "tests.engines.scripted_kind:open_scripted"}


async def open_scripted(parts: EngineParts) -> ScriptedEngine:
    ((policy, version),) = parts.versions.items()
    return ScriptedEngine(
        lambda request: range(100),
        name=parts.name,
        policy=policy,
        version=version,
        max_context=parts.config.max_context,
    )
