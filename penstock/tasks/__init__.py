"""Tasks: where prompts come from, and the endless stream that a run takes them from."""

from penstock.tasks.config import TasksConfig
from penstock.tasks.load import default_reward, load_tasks
from penstock.tasks.stream import StreamState, TaskStream

__all__ = ["TasksConfig", "load_tasks", "default_reward", "TaskStream", "StreamState"]
