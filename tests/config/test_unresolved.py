import pytest

from penstock.config.unresolved import refuse_auto
from penstock.errors import ConfigError


def test_a_worker_names_the_settings_that_nobody_resolved() -> None:
    refuse_auto({"engine.dtype": "float32", "trainer.compile": "off"})
    with pytest.raises(
        ConfigError, match=r"a value for engine\.dtype and sync\.transport, got 'auto'; resolve"
    ):
        refuse_auto({"engine.dtype": "auto", "trainer.dtype": "float32", "sync.transport": "auto"})
