import yaml

from penstock.cli.config_reference import configuration_reference, starter_config
from penstock.config.loader import build
from penstock.config.root import PenstockConfig


def test_the_starter_is_a_config_of_defaults() -> None:
    assert build(PenstockConfig, yaml.safe_load(starter_config())) == PenstockConfig()


def test_keys_of_inner_sections_can_be_switched_on_by_uncommenting_them() -> None:
    text = starter_config().replace("    # max_batch: 64", "    max_batch: 7")
    assert build(PenstockConfig, yaml.safe_load(text)).engine.embedded.max_batch == 7


def test_the_reference_has_a_table_for_inner_sections() -> None:
    before, _, after = configuration_reference().partition("## `engine.embedded`")
    assert "| `max_batch` | int | `64` |" in after
    assert "`max_batch`" not in before


def test_a_section_that_is_off_by_default_is_described_once() -> None:
    reference = configuration_reference()
    assert reference.count("## `model.lora`") == 1
    assert "| `rank` | int | `16` |" in reference
    assert "## `eval.tasks`" not in reference
