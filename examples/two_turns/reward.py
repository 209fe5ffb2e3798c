"""What a digit is worth: every digit of every answer is a step with a value of its own."""

from penstock import Score, StepScore


def digits(task, episode):
    """The score is 1 if the last answer is right. Its steps credit each digit of both answers by itself, so that
    the second turn learns from the start, when whole answers there are hardly ever right.

    The built-in model writes one character a token: a character's place is its token's place in the turn."""
    answer = task.columns["answer"]
    steps = [
        StepScore(turn=number, start=place, end=place + 1, value=float(digit == right))
        for number, turn in enumerate(episode.turns)
        for place, (digit, right) in enumerate(zip(turn.text, answer, strict=False))
    ]
    return Score(value=float(episode.text == answer), steps=tuple(steps))
