from penstock.observe.slots import Slots


def test_the_lowest_free_slot_is_taken_so_there_are_as_many_as_ever_ran_at_once() -> None:
    slots = Slots()
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.give_back(2)
    slots.give_back(0)
    assert [slots.take() for _ in range(3)] == [0, 2, 3]
