"""An environment of `verifiers` with an `Env` of its own: two sums, the second made of the answer to the first."""

from typing import Any

import verifiers.v1 as vf


class ChainedData(vf.TaskData):
    answer: str


class ChainedTask(vf.Task[ChainedData]):
    pass


class ChainedEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class ChainedEnv(vf.Env[ChainedEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            first = await interaction.turn()
            second = await interaction.turn(f"{first.last_reply.strip()}+105=")
        right = second.last_reply.strip() == task.data.answer
        interaction.trace.record_reward("exact", float(right), 1.0)


class ChainedSums(vf.Taskset[ChainedTask]):
    def load(self) -> Any:
        yield ChainedTask(ChainedData(prompt="100+200=", answer="405"), self.config.task)


__all__ = ["ChainedEnv", "ChainedSums"]
