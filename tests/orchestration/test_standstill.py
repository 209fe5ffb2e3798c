from penstock.orchestration.standstill import USUAL_CAUSES, Mark, StageWatch


def test_a_stage_with_work_that_does_not_move_is_told_again_and_again() -> None:
    watch, told = StageWatch(60.0), []
    for now in range(0, 200, 10):
        told += [(now, *one) for one in watch.look(now, {"scoring": Mark(work=1, progress=5)})]
    assert told == [(70, "scoring", 70), (140, "scoring", 70)]


def test_a_stage_without_work_or_with_progress_is_not() -> None:
    watch = StageWatch(60.0)
    for now in range(0, 500, 10):
        marks = {"scoring": Mark(work=0, progress=5), "training": Mark(work=1, progress=now // 50)}
        assert watch.look(now, marks) == []


def test_time_before_there_was_work_does_not_count() -> None:
    watch = StageWatch(60.0)
    for now in range(0, 100, 10):
        watch.look(now, {"generation": Mark(work=0, progress=1)})
    assert watch.look(100.0, {"generation": Mark(work=1, progress=1)}) == []
    assert watch.look(140.0, {"generation": Mark(work=1, progress=1)}) == []
    assert watch.look(151.0, {"generation": Mark(work=1, progress=1)}) == [("generation", 61.0)]


def test_every_stage_has_usual_causes() -> None:
    assert USUAL_CAUSES.keys() == {"generation", "scoring", "training", "weight sync"}
