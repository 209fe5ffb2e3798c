"""Tasks of a `verifiers` environment: which of its tasks to play. The environment itself has the prompts."""


def indices(count):
    """The first so many tasks. The prompt is only shown in logs and checked for its length."""
    for idx in range(count):
        yield {"id": f"sums-{idx}", "prompt": "+", "idx": idx}
