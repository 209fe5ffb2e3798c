"""One episode of an environment of `verifiers`: `python run_environment.py TASKSET`, started for every episode.

It runs where `verifiers` is installed and needs nothing of Penstock. The training client of `verifiers` renders
messages to token ids itself and asks the run for token ids, so that both agree on every token.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import environment_class, load_environment


async def main(taskset_id: str) -> None:
    row = json.load(sys.stdin)
    sys.path.insert(0, os.getcwd())
    model = os.environ["PENSTOCK_MODEL"]
    kind = environment_class(taskset_id)
    if kind is not vf.SingleAgentEnv:
        raise SystemExit(f"{taskset_id} has an environment of its own: build its config here")
    # The chat loop of verifiers, on this machine; other harnesses and runtimes are named here too.
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = load_environment(vf.SingleAgentEnvConfig(taskset={"id": taskset_id}, agent=agent))
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
