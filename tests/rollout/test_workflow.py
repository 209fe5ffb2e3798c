import pytest

from penstock.errors import UserError
from penstock.records import Task
from penstock.rollout.command_workflow import CommandWorkflow
from penstock.rollout.http_environment import HttpEnvironment
from penstock.rollout.workflow import FunctionWorkflow, SingleTurn, Workflows, as_workflow, load_workflow
from penstock.tasks.task_rows import tasks_from_rows
from tests.rollout import workflows


@pytest.mark.parametrize("name", ["Kept", "kept"])
def test_a_class_and_an_object_with_run_are_workflows(name: str) -> None:
    assert isinstance(load_workflow(f"tests.rollout.workflows:{name}"), workflows.Kept)


def test_a_function_is_a_workflow() -> None:
    assert isinstance(load_workflow("tests.rollout.workflows:twice"), FunctionWorkflow)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.rollout.workflows:nothing", "has no function 'nothing'"),
        ("tests.rollout.workflows:not_async", "a workflow must be `async def"),
        ("twice", "a workflow must be module:function or path/to/file.py:function, got 'twice'"),
    ],
)
def test_what_is_no_workflow_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        load_workflow(path)
    assert message in str(refused.value)


def test_the_parameters_are_checked() -> None:
    async def old(task: Task) -> None: ...

    with pytest.raises(UserError, match=r"a workflow takes \(task, rollout\), got old\(task"):
        as_workflow(old)


def test_a_tasks_own_workflow_goes_before_the_runs() -> None:
    book = Workflows()
    own = Task(id="a", prompt="", workflow="tests.rollout.workflows:twice")
    assert isinstance(book.of(Task(id="b", prompt="")), SingleTurn)
    assert isinstance(book.of(own), FunctionWorkflow)
    assert book.of(own) is book.of(own)
    assert book.check([own])
    assert not book.check([Task(id="b", prompt="")])
    with pytest.raises(UserError, match="has no function"):
        book.check([Task(id="c", prompt="", workflow="tests.rollout.workflows:gone")])


def test_a_task_may_name_a_command_or_a_url() -> None:
    """From a row of a source to what is run."""
    rows = [{"prompt": "p", "workflow": path} for path in ("python3 agent.py", "http://host/env")]
    book, (command, url) = Workflows(), tasks_from_rows(rows)
    assert book.check([command, url])
    agent = book.of(command)
    assert isinstance(agent, CommandWorkflow)
    assert agent.words == ("python3", "agent.py")
    assert isinstance(book.of(url), HttpEnvironment)
    (prose,) = tasks_from_rows([{"prompt": "p", "id": "t7", "workflow": "nosuch-program by hand"}])
    with pytest.raises(
        UserError, match="no program 'nosuch-program' .column 'workflow' of task 't7'; .*tasks.columns"
    ):
        book.check([prose])
