from penstock.bench.sync.plain_copy import LARGEST, PlainCopy, plain_copy_s


def test_bytes_are_copied() -> None:
    copy = PlainCopy(1000, "cpu")
    assert copy._target.sum() == 0
    assert copy.run() > 0
    assert copy._target.sum() == 1000


def test_a_large_copy_is_extrapolated(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("penstock.bench.sync.plain_copy.LARGEST", 1000)
    copy = PlainCopy(5000, "cpu")
    assert (len(copy._source), copy._scale) == (1000, 5.0)
    assert LARGEST == 1 << 30


def test_a_size_is_measured_once() -> None:
    assert plain_copy_s(4096, "cpu") == plain_copy_s(4096, "cpu") > 0
