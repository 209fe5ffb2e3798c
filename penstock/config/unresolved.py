"""Handles settings that say `auto`, which `placement/automatic.py` resolves when a run is prepared.

Parts that are used on their own, such as a trainer in a script, take `auto` for float32 and uncompiled.
"""

from collections.abc import Mapping

from penstock.errors import ConfigError

AUTO = "auto"


def refuse_auto(settings: Mapping[str, object]) -> None:
    """Refuse unresolved settings in workers of a run: if each chose for itself, engine and trainer could choose
    differently."""
    unresolved = [name for name, value in settings.items() if value == AUTO]
    if unresolved:
        raise ConfigError(
            f"a worker needs a value for {' and '.join(unresolved)}, got 'auto'; resolve the config before "
            "(penstock.placement.automatic)"
        )
