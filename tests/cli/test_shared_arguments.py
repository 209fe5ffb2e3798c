from pathlib import Path

from penstock.cli.shared_arguments import file_and_words


def test_an_override_may_be_longer_than_a_file_name() -> None:
    word = f"rollout.stop=[{', '.join(['end'] * 100)}]"
    assert file_and_words(word, ["run.steps=2"]) == (None, [word, "run.steps=2"])
    assert file_and_words("config.yaml", None) == (Path("config.yaml"), [])
