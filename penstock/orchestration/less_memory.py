"""What is lowered after a worker ran out of memory, where that is safe: an engine holds fewer sequences at a time.

What an answer is does not depend on how many others are computed with it, apart from rounding. The trainer's share
is `StepRunner.shrink`."""

import msgspec

from penstock.engines.config import EngineConfig, with_settings
from penstock.engines.engine_client import EngineStart
from penstock.engines.kinds import kind_of, settings_of


def fewer_sequences(start: EngineStart) -> tuple[EngineStart, str] | None:
    """How the next process of an engine is started, and a word on that; None where there is nothing to halve."""
    section = EngineConfig.model_validate(start.config)
    setting = kind_of(section.kind).lowered
    before = getattr(settings_of(section), setting) if setting else 0
    if before < 2:
        return None
    config = with_settings(section, **{setting: before // 2}).model_dump(mode="json")
    word = f"{start.name} computes {before // 2} sequences at a time from now on, instead of {before}"
    return msgspec.structs.replace(start, config=config), f"{word} (engine.{section.kind}.{setting})"
