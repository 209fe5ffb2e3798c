"""A workflow of several turns with a calculator: Python calls the tool where the model asks for it."""

import json
import re

CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)


def add(call):
    """The tool. What the model wrote may be anything."""
    try:
        numbers = json.loads(call)["arguments"]
        return int(numbers["a"]) + int(numbers["b"])
    except (ValueError, KeyError, TypeError):
        return 0


async def with_calculator(task, rollout):
    """Turns go on after each other token by token, so that all of them are one training sequence. What the tool
    says is context."""
    turn = await rollout.generate(task.prompt)
    while call := CALL.search(turn.text):
        result = await rollout.call(add, call[1])
        addition = [{"role": "tool", "content": str(result)}]
        turn = await rollout.generate(rollout.continue_(turn, addition))
    return float(turn.text == task.columns["answer"])
