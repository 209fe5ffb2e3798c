import pytest

from penstock.errors import TaskError
from penstock.tasks.chat_prompts import resolve_chat
from penstock.tasks.config import TasksConfig
from penstock.tasks.task_rows import tasks_from_rows
from penstock.types import Message

ASKED, BRIEF = Message(role="user", content="1+1?"), Message(role="system", content="Be brief.")
ROWS = [{"prompt": "1+1?"}, {"prompt": [ASKED]}]


@pytest.mark.parametrize(
    ("config", "has_template", "prompts"),
    [
        ({}, True, [(ASKED,), (ASKED,)]),
        ({}, False, ["1+1?", (ASKED,)]),
        ({"as_chat": False}, True, ["1+1?", (ASKED,)]),
        ({"as_chat": True}, False, [(ASKED,), (ASKED,)]),
        ({"system": "Be brief."}, True, [(BRIEF, ASKED), (BRIEF, ASKED)]),
    ],
)
def test_strings_become_messages_where_the_model_has_a_template(
    config: dict[str, object], has_template: bool, prompts: list[object]
) -> None:
    section = TasksConfig.model_validate(config)
    tasks, decided = resolve_chat(tasks_from_rows(ROWS, section), section, has_template=has_template)
    assert [task.prompt for task in tasks] == prompts
    assert decided.as_chat is config.get("as_chat", has_template)


def test_a_system_message_needs_a_template() -> None:
    section = TasksConfig(system="Be brief.")
    with pytest.raises(TaskError, match="the model has no chat template; leave tasks.system out"):
        resolve_chat(tasks_from_rows(ROWS, section), section, has_template=False)


def test_what_the_run_sets_itself_is_no_template_argument() -> None:
    with pytest.raises(ValueError, match="must not have 'tokenize'"):
        TasksConfig(template_args={"tokenize": False, "enable_thinking": False})
