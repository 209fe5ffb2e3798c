"""What is lowered after a worker ran out of memory, where that is safe: an engine holds fewer sequences at a time.

What an answer is does not depend on how many others are computed with it, apart from rounding. The trainer's share
is `StepRunner.shrink`."""

import msgspec

from penstock.engines.engine_client import EngineStart

LOWERED = "embedded"
"""The kind of engine whose settings these are. vLLM's servers find their own."""


def fewer_sequences(start: EngineStart) -> tuple[EngineStart, str] | None:
    """How the next process of an engine is started, and a word on that; None where there is nothing to halve."""
    section = start.config.get(LOWERED, {})
    before = section.get("max_batch", 0)
    if start.config.get("kind", LOWERED) != LOWERED or before < 2:
        return None
    config = {**start.config, LOWERED: {**section, "max_batch": before // 2}}
    word = f"{start.name} computes {before // 2} sequences at a time from now on, instead of {before}"
    return msgspec.structs.replace(start, config=config), f"{word} (engine.embedded.max_batch)"
