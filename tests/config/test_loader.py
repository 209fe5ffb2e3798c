from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from penstock.config import Section
from penstock.config.loader import build, load_config, read_yaml
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError


class Gate(Section):
    max_staleness: int = Field(default=4, ge=0)
    late: Literal["mask", "wait"] = "mask"


class Root(Section):
    staleness: Gate = Gate()
    extra: Gate | None = None


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path: Path) -> None:
    config = load_config(
        Root,
        write(tmp_path, "staleness:\n  max_staleness: 2\n"),
        ["staleness.late=wait", "extra.max_staleness=7"],
    )
    assert (config.staleness.max_staleness, config.staleness.late) == (2, "wait")
    assert config.extra == Gate(max_staleness=7)


def test_an_override_fills_a_section_that_the_file_leaves_empty(tmp_path: Path) -> None:
    path = write(tmp_path, "staleness:\n  # late: mask\nextra:\n")
    assert load_config(Root, path) == Root()
    config = load_config(Root, path, ["staleness.late=wait", "extra.late=wait"])
    assert (config.staleness, config.extra) == (Gate(late="wait"), Gate(late="wait"))


class Outer(Section):
    gates: Root = Root()


def test_sections_within_sections_may_be_empty_and_their_keys_are_found(tmp_path: Path) -> None:
    path = write(tmp_path, "gates:\n  staleness:\n  # late: mask\n")
    assert load_config(Outer, path) == Outer()
    assert load_config(Outer, path, ["gates.staleness.late=wait"]).gates.staleness.late == "wait"
    with pytest.raises(ConfigError, match=r"'late' in section 'gates'; did you mean 'gates\.extra\.late'\?"):
        load_config(Outer, path, ["gates.late=wait"])


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "staleness: {max_stalenes: 1}",
            [],
            "unknown key 'max_stalenes' in section 'staleness'; did you mean 'max_staleness'?",
        ),
        ("stalenes: {}", [], "unknown key 'stalenes' in the config; did you mean 'staleness'?"),
        ("", ["zzz=1"], "unknown key 'zzz' in the config; known keys: extra, staleness"),
        ("", ["extra.lat=mask"], "unknown key 'lat' in section 'extra'; did you mean 'late'?"),
        (
            "",
            ["late=mask"],
            "unknown key 'late' in the config; did you mean 'extra.late'?",
        ),
        (
            "",
            ["staleness.max_staleness=-1"],
            "staleness.max_staleness: input should be greater than or equal to 0, got -1",
        ),
        ("", ["staleness.late=never"], "staleness.late: input should be 'mask' or 'wait', got 'never'"),
        ("", ["staleness"], "an override must look like section.key=value, got 'staleness'"),
        ("- 1", [], "must hold sections (key: value), got a list"),
        ("a: [1", [], "is not valid YAML (line 1)"),
    ],
)
def test_one_sentence_errors(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Root, write(tmp_path, text), overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(Root, tmp_path / "nowhere.yaml")


def test_a_section_made_in_python_refuses_unknown_keys_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_staleness'"):
        Gate(max_stalenes=1)  # type: ignore[call-arg]


def test_a_bare_on_or_off_is_the_word_where_the_word_is_a_choice(tmp_path: Path) -> None:
    """YAML reads both as truth values."""

    class Engine(Section):
        compile: Literal["off", "on"] = "off"
        checks: Literal["off", "full"] = "full"
        cache: bool = True

    text = "compile: on\nchecks: off\ncache: off\n"
    config = load_config(Engine, write(tmp_path, text), [])
    assert (config.compile, config.checks, config.cache) == ("on", "off", False)
    assert load_config(Engine, write(tmp_path, text), ["compile=off"]).compile == "off"
    with pytest.raises(ConfigError, match="checks"):
        load_config(Engine, write(tmp_path, text), ["checks=on"])


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 3000,
        "{a: " * 3000,
        "".join(f"{' ' * level}a:\n" for level in range(1200)),
        "a: " + "{b: " * 60,
    ],
)
def test_what_is_nested_too_deeply_is_refused_before_the_parser_has_read_it_all(
    tmp_path: Path, text: str
) -> None:
    """To the end that takes the parser time that grows with the square of the depth, and Python's stack."""
    with pytest.raises(ConfigError, match=r"config.yaml is nested more than 50 levels deep$"):
        read_yaml(write(tmp_path, text))
    with pytest.raises(
        ConfigError, match=r"^override staleness.late: its value is nested more than 50 levels"
    ):
        load_config(Root, None, [f"staleness.late={text.removeprefix('a: ')}"])


def test_fifty_levels_are_read(tmp_path: Path) -> None:
    data = read_yaml(write(tmp_path, "a: " + "[" * 49 + "]" * 49))
    assert str(data["a"]) == "[" * 49 + "]" * 49


def test_hidden_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.arguments\.token is hidden"):
        build(PenstockConfig, {"tasks": {"arguments": {"token": "***"}}})


def test_secrets_are_not_shown_in_errors() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(PenstockConfig, None, ["tasks.arguments.token={s3cret"])
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("name", ["../out", "a/b", "/abs", "", ".", "..", "nul\0", "new\nline", " "])
def test_a_run_stays_in_its_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        build(PenstockConfig, {"run": {"name": name}})


@pytest.mark.parametrize("device", ["tpu", "cuda:x", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.device"):
        build(PenstockConfig, {"model": {"device": device}})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sync.slots=0", "sync.slots: input should be greater than or equal to 1, got 0"),
        ("run.seed=-1", "run.seed: input should be greater than or equal to 0, got -1"),
        (f"run.seed={10**23}", f"run.seed: input should be at most {2**63 - 1}, got {10**23}"),
        (f"run.steps={2**63}", f"run.steps: input should be at most {2**63 - 1}, got {2**63}"),
    ],
)
def test_numbers_that_no_run_could_start_with_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(PenstockConfig, None, [setting])
    assert str(raised.value) == message
    assert load_config(PenstockConfig, None, [f"run.seed={2**63 - 1}"]).run.seed == 2**63 - 1
