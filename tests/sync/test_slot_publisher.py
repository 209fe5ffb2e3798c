from penstock.sync.slot_publisher import Bases


def sent(bases: Bases, version: int, **options: bool) -> tuple[int | None, list[int]]:
    """What it builds on, and which snapshots are free once every engine has it."""
    return bases.of(version, full=options.get("full", False)), bases.released(version, delivered=True)


def test_a_delta_builds_on_what_was_acknowledged_last_and_anchors_come_regularly() -> None:
    bases = Bases("delta", None, 3)
    assert [sent(bases, version) for version in (1, 2, 5, 6, 7)] == [
        (None, []),
        (1, [1]),
        (2, [2]),
        (None, [5]),
        (6, [6]),
    ]


def test_a_version_that_did_not_arrive_is_no_base() -> None:
    bases = Bases("delta", None, 9)
    sent(bases, 1)
    assert bases.of(2, full=False) == 1
    assert bases.released(2, delivered=False) == [2]
    assert sent(bases, 3) == (1, [1])


def test_a_full_one_can_be_asked_for_also_of_the_base_itself() -> None:
    bases = Bases("delta", None, 3)
    sent(bases, 1)
    assert bases.of(2, full=False) == 1
    assert sent(bases, 2, full=True) == (None, [1])
    assert bases.of(2, full=True) is None
    assert bases.released(2, delivered=True) == []
    assert [sent(bases, version)[0] for version in (3, 4, 5)] == [2, 3, None]


def test_others_keep_no_snapshots() -> None:
    assert [sent(Bases("full", None, 3), 1), sent(Bases("adapter", 4, 3), 5)] == [(None, [1]), (4, [5])]
    parts = Bases("full", 4, 3)
    assert [sent(parts, 5), sent(parts, 6)] == [(4, [5]), (5, [6])]
