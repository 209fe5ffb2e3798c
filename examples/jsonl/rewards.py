"""Two rewards, one in each form. Either form can be used alone."""


def correct(task, completion):
    """Plain form, once per completion: 1 when the last line is the answer."""
    lines = completion.strip().splitlines()
    return float(bool(lines) and lines[-1].strip().rstrip(".") == task.columns["answer"])


def brief(completions, **columns):
    """TRL's form, once per group: chat tasks come with completions as lists of messages."""
    lengths = [len(messages[-1]["content"]) for messages in completions]
    return [1.0 - min(1.0, length / 400) for length in lengths]
