from penstock.scoring.builtin_rewards import exact_match
from penstock.types import Task


def test_white_space_at_the_ends_and_the_answers_type_do_not_matter() -> None:
    task = Task(id="x", prompt="p", columns={"answer": 12})
    assert [exact_match(task, text) for text in ("12", "\n12 ", "1 2", "")] == [1.0, 1.0, 0.0, 0.0]
