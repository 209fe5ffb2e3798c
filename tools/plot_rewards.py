"""Draw the reward of runs over their steps: `python tools/plot_rewards.py OUT.png NAME=RUN_FOLDER …`."""

import json
import sys
from pathlib import Path


def rewards_of(folder: Path) -> tuple[list[int], list[float], list[tuple[int, float]]]:
    """Steps, their mean rewards, and what was measured on held-out tasks."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    heldout = [(row["step"], row["heldout_reward"]) for row in rows if "heldout_reward" in row]
    return [row["step"] for row in steps], [row["reward"] for row in steps], heldout


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out, *runs = sys.argv[1:]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    for number, named in enumerate(runs):
        name, _, folder = named.partition("=")
        steps, rewards, heldout = rewards_of(Path(folder))
        axes.plot(steps, rewards, color=f"C{number}", label=name)
        if heldout:
            axes.plot(*zip(*heldout, strict=True), "o", color=f"C{number}", label=f"{name}, held out")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
