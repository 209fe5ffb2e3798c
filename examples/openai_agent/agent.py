"""An agent with a tool, written with nothing but the `openai` package. It knows nothing of training."""

import json
import os
import sys

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CLIENT = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="set below")
"""One for all episodes of a process: it keeps connections open."""


def solve(client, model, messages):
    """Answer the user, with calls of the tool as long as the model wants some."""
    messages = list(messages)
    while True:
        made = client.chat.completions.create(model=model, messages=messages, tools=[ADD])
        message = made.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)}
            )


def add(arguments):
    """The tool. What the model wrote may be anything."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) + int(numbers["b"]))
    except (ValueError, KeyError, TypeError):
        return "0"


async def episode(task, rollout):
    """Called for every attempt, each in a thread of its own. What it returns is the reward."""
    address = rollout.endpoint
    client = CLIENT.with_options(base_url=address.base_url, api_key=address.api_key)
    messages = [{"role": message.role, "content": message.content} for message in task.prompt]
    return float(solve(client, address.model, messages) == task.columns["answer"])


def main():
    """The same as a program that is started for every attempt: `rollout.workflow="python agent.py"`."""
    task = json.load(sys.stdin)
    client = CLIENT.with_options(api_key=os.environ["OPENAI_API_KEY"])
    answer = solve(client, os.environ["PENSTOCK_MODEL"], task["prompt"])
    print(json.dumps({"reward": float(answer == task["answer"])}))


if __name__ == "__main__":
    main()
