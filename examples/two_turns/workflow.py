"""Check and ask again: a wrong answer gets the same question once more, after everything that was said."""


async def ask_again(task, rollout):
    """The reward sees the last answer. Both turns are trained, as one sequence: the second continues the first
    token by token, and the question between them is context."""
    first = await rollout.generate(task.prompt)
    if first.text != task.columns["answer"]:
        await rollout.generate(rollout.continue_(first, task.prompt))
