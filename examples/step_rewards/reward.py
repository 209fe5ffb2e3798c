"""A reward per digit: every digit of the sum is a step with a value of its own."""

from penstock import Score, StepScore


def digits(task, episode):
    """1 for each right digit, and 1 for stopping after the last.

    The built-in model writes one character a token, so a character's place in the text is its token's place in the
    turn. With another tokenizer, find the tokens of a step in `episode.turns[0].output_ids`."""
    answer, text = task.columns["answer"], episode.text
    steps = [
        StepScore(turn=0, start=place, end=place + 1, value=float(digit == right))
        for place, (digit, right) in enumerate(zip(text, answer, strict=False))
    ]
    num_tokens = len(episode.turns[0].output_ids)
    if num_tokens > len(steps):
        stopped = float(len(text) == len(answer))
        steps.append(StepScore(turn=0, start=len(steps), end=num_tokens, value=stopped))
    share = sum(step.value for step in steps) / (len(answer) + 1)
    return Score(value=share, parts={"exact": float(text == answer)}, steps=tuple(steps))
