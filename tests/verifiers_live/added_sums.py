"""An environment of `verifiers` with a tool: `verifiers` starts this file again as the tool's server."""

from typing import Any

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class AddedData(vf.TaskData):
    answer: str


class AddedTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddedTask(vf.Task[AddedData, vf.State, AddedTaskConfig]):
    @classmethod
    def toolsets(cls, config: AddedTaskConfig) -> list[Any]:
        return [Calculator(config.tools)]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class AddedConfig(vf.TasksetConfig):
    task: AddedTaskConfig = AddedTaskConfig()


class AddedSums(vf.Taskset[AddedTask, AddedConfig]):
    def load(self) -> Any:
        yield AddedTask(AddedData(prompt="100+200=", answer="300"), self.config.task)


__all__ = ["AddedSums"]

if __name__ == "__main__":
    Calculator.run()
