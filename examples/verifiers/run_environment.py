"""One episode of an environment of `verifiers`, started for every episode:

    python run_environment.py TASKSET [--renderer NAME [KEY=VALUE ...]]

It runs where `verifiers` is installed and needs nothing of Penstock. The training client of `verifiers` renders
messages to token ids itself and asks the run for token ids, so that both agree on every token.
"""

import argparse
import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import env_config_type, load_environment


def read_renderer(words: list[str]) -> dict[str, object]:
    """`NAME KEY=VALUE ...` as verifiers wants it; values are JSON where they can be."""
    name, *settings = words
    renderer: dict[str, object] = {"name": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise SystemExit(f"--renderer takes a name and then KEY=VALUE, got {setting!r}")
        try:
            renderer[key] = json.loads(value)
        except ValueError:
            renderer[key] = value
    return renderer


async def main(taskset_id: str, renderer: dict[str, object] | None) -> None:
    row = json.load(sys.stdin)
    # Servers of tools are programs of their own, in another folder: they find the environment's file by PYTHONPATH.
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
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
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer_model_name=model,
        renderer=renderer,
    )
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model=model, client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise SystemExit(f"the episode failed: {[error.message for error in errors]}")
    print(json.dumps({"reward": sum(trace.reward for trace in episode.traces)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset")
    parser.add_argument("--renderer", nargs="+", metavar=("NAME", "KEY=VALUE"))
    given = parser.parse_args()
    asyncio.run(main(given.taskset, read_renderer(given.renderer) if given.renderer else None))
