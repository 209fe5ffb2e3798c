import yaml

from penstock.cli.config_reference import configuration_reference, whole_config
from penstock.config.loader import build
from penstock.config.root import PenstockConfig


def test_every_key_is_there_with_its_default() -> None:
    assert build(PenstockConfig, yaml.safe_load(whole_config())) == PenstockConfig()


def test_comments_are_not_broken_inside_backticks() -> None:
    lines = [line for line in whole_config().splitlines() if line.lstrip().startswith("# ")]
    assert len(lines) > 400
    assert [line for line in lines if line.count("`") % 2] == []


def test_keys_of_inner_sections_can_be_switched_on_by_uncommenting_them() -> None:
    text = whole_config().replace("    # max_batch: 64", "    max_batch: 7")
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
