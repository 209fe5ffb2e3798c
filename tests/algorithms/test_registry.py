import pytest

from penstock.algorithms.registry import Registry
from penstock.errors import ConfigError


def test_register_bind_and_refuse():
    registry = Registry("thing")

    @registry.register("scale")
    def scale(value, *, by=2.0):
        """Scales.

        By a factor."""
        return value * by

    assert registry.names() == ("scale",)
    assert registry.bind("scale", {})(3) == 6
    assert registry.bind("scale", {"by": 5.0})(3) == 15
    (entry,) = registry.describe()
    assert (entry.kind, entry.name, entry.summary, entry.parameters) == (
        "thing",
        "scale",
        "Scales.",
        {"by": 2.0},
    )
    with pytest.raises(ConfigError, match="unknown thing 'scal'; did you mean 'scale'"):
        registry.get("scal")
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("scale")(scale)
