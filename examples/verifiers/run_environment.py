"""One episode of an environment of `verifiers`: `python run_environment.py TASKSET`, started for every episode.

It runs where `verifiers` is installed and needs nothing of Penstock. The training client of `verifiers` renders
messages to token ids itself and asks the run for token ids, so that both agree on every token.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import env_config_type, load_environment


async def main(taskset_id: str) -> None:
    row = json.load(sys.stdin)
    sys.path.insert(0, os.getcwd())
    model = os.environ["PENSTOCK_MODEL"]
    # The chat loop of verifiers, on this machine; other harnesses and runtimes are named here too. Every role of an
    # environment with several is played by the policy.
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    kind = env_config_type(taskset_id)
    fields = kind.model_fields.items()
    roles = {name: agent for name, field in fields if isinstance(field.default, vf.AgentConfig)}
    env = load_environment(kind(taskset={"id": taskset_id}, **roles))
    (task,) = env.taskset.include(idx=[str(row["idx"])])
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", renderer_model_name=model
    )
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model=model, client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise SystemExit(f"the episode failed: {[error.message for error in errors]}")
    print(json.dumps({"reward": sum(trace.reward for trace in episode.traces)}))


asyncio.run(main(sys.argv[1]))
