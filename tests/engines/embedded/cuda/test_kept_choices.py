import json

import pytest
import torch
from torch._inductor import config

from penstock.engines.embedded.cuda import kept_choices
from penstock.engines.embedded.cuda.kept_choices import FILE, KeptChoices, keep_choices


def test_choices_are_found_again_in_their_own_setting(tmp_path):
    path = tmp_path / FILE
    kept = KeptChoices(path, "one GPU")
    assert "a" not in kept
    kept["a"], kept["b"] = b"\x01\xff", None
    assert kept["a"] == b"\x01\xff"
    kept.save()
    again = KeptChoices(path, "one GPU")
    assert (again["a"], again["b"]) == (b"\x01\xff", None)
    assert "a" not in KeptChoices(path, "another GPU")
    assert [each.name for each in tmp_path.iterdir()] == [FILE]


def test_what_others_kept_meanwhile_stays(tmp_path):
    path = tmp_path / FILE
    ours, theirs, elsewhere = (KeptChoices(path, setting) for setting in ("GPU", "GPU", "other GPU"))
    for number, kept in enumerate((ours, theirs, elsewhere)):
        kept[f"size {number}"] = bytes([number])
        kept.save()
    assert json.loads(path.read_text()) == {
        "GPU": {"size 0": "00", "size 1": "01"},
        "other GPU": {"size 2": "02"},
    }


@pytest.mark.parametrize(
    "content", ["", "[1]", "{", "\x00", '{"GPU": 3}', '{"GPU": {"a": 3}}', '{"GPU": {"a": "xy"}}']
)
def test_a_file_that_is_not_ours_is_written_anew(content, tmp_path):
    path = tmp_path / FILE
    path.write_text(content)
    kept = KeptChoices(path, "GPU")
    kept["a"] = b"1"
    kept.save()
    assert KeptChoices(path, "GPU")["a"] == b"1"


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path):
    kept = KeptChoices(tmp_path / "missing" / FILE, "GPU")
    kept["a"] = b"1"
    kept.save()
    assert kept["a"] == b"1"
    KeptChoices(None, "GPU").save()


def test_the_setting_is_the_gpu_the_versions_and_the_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    code = tmp_path / "code.py"

    def keep(version, text):
        code.write_text(text)
        kept = keep_choices(torch.device("cpu"), version, (str(code),))
        is_known = "size" in kept
        kept["size"] = b"1"
        kept.save()
        return is_known

    assert [keep(1, "x"), keep(1, "x"), keep(2, "x"), keep(2, "y"), keep(2, "y")] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert (tmp_path / FILE).exists()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert not keep(2, "y")
    with config.patch(force_disable_caches=True):
        assert kept_choices._path() is None
