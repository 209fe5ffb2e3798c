from penstock.engines.engine_choice import EngineChoice
from penstock.engines.rolling_update import Member
from tests.engines.contract import ask


def test_those_that_leave_or_drain_come_last_and_lost_ones_never() -> None:
    one, two, three = members = [Member(name, None) for name in ("a", "b", "c")]  # type: ignore[arg-type]
    choice = EngineChoice()
    one.is_leaving, two.is_draining, three.load = True, True, 5
    assert choice.find(ask("1", [1]), members) is three
    assert choice.find(ask("2", [2]), [one, two]) is two
    assert choice.find(ask("3", [1]), [one, two]) is two
