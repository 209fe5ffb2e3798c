"""What the page asks for, over a real socket, from a made-up run."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.page.fake_run import GROUP_SIZE, GROUPS, HOSTILE, FakeRun
from tests.page.live_page import TOKEN, Server, served

STEPS = 40
ALL = STEPS * GROUPS * GROUP_SIZE


def ask(question: Callable[[Server], Any], *runs: FakeRun) -> Any:
    async def main() -> Any:
        async with served(*runs) as server:
            return await question(server)

    return asyncio.run(main())


def test_samples_come_newest_first_a_page_at_a_time() -> None:
    first = ask(lambda server: server.get("run/0/samples", limit="10"))
    assert (first["kept"], first["matched"], first["steps"]) == (ALL, ALL, [1, STEPS])
    assert [row["row"] for row in first["rows"]] == list(range(ALL - 1, ALL - 11, -1))
    second = ask(lambda server: server.get("run/0/samples", limit="10", offset="10"))
    assert second["rows"][0]["row"] == ALL - 11


def test_samples_are_filtered_by_every_column() -> None:
    run = FakeRun()
    columns = run.samples.columns
    wanted = (
        (columns["step"] >= 30)
        & (columns["step"] <= 35)
        & (columns["reward"] == 1)
        & (columns["tokens"] >= 4)
        & (columns["age"] <= 2)
    )
    found = ask(
        lambda server: server.get(
            "run/0/samples", step="30..35", reward="1..", tokens="4..", age="..2", drop="none"
        ),
        run,
    )
    assert found["matched"] == int(wanted.sum()) > 0


def test_dropped_samples_are_found_by_their_reason() -> None:
    found = ask(lambda server: server.get("run/0/samples", drop="too old", limit="1"))
    assert found["matched"] == STEPS * GROUP_SIZE
    assert found["rows"][0]["drop"] == "too old" and found["rows"][0]["step"] is None


@pytest.mark.parametrize(("order", "best"), [("best", 1.0), ("worst", 0.0)])
def test_samples_are_ordered(order: str, best: float) -> None:
    rows = ask(lambda server: server.get("run/0/samples", sort=order))["rows"]
    assert {row["reward"] for row in rows} == {best}
    assert rows[0]["row"] > rows[-1]["row"]


def test_a_histogram_counts_without_its_own_filter() -> None:
    counts = ask(lambda server: server.get("run/0/counts", reward="1..1"))
    assert sum(counts["reward"]["counts"]) == ALL
    assert sum(counts["tokens"]["counts"]) < ALL
    assert {one["name"] for one in counts["drop"]} == {"", "too old"}


def test_a_sample_and_its_group_are_whole() -> None:
    sample = ask(lambda server: server.get("run/0/sample/3"))
    assert sample["answer"] == HOSTILE
    group = ask(lambda server: server.get(f"run/0/group/{sample['group']}"))
    assert [one["episode"] for one in group["samples"]] == [0, 1, 2, 3]


def test_a_sample_of_several_turns_has_them_all_and_a_list_has_none() -> None:
    several = ask(lambda server: server.get("run/0/sample/2"))["transcript"]
    assert several[1:3] == [
        {"label": "turn 1: model", "is_read": False, "text": "<call>mul(12, 7)</call><|end|>"},
        {"label": "turn 2: context", "is_read": True, "text": "<|tool|>84<|end|><|model|>"},
    ]
    single = ask(lambda server: server.get("run/0/sample/1"))
    assert (single["transcript"], single["extra"]) == ([], {})
    listed = ask(lambda server: server.get("run/0/samples", limit="4"))["rows"]
    assert all("transcript" not in row for row in listed)


def test_tokens_are_arrays_of_one_length_and_unknown_numbers_are_null() -> None:
    run = FakeRun()
    row = int(np.flatnonzero(run.samples.columns["traced"])[0])
    trace = ask(lambda server: server.get(f"run/0/tokens/{row}"), run)["traces"][0]
    names = ("texts", "ids", "versions", "mask", "engine", "trainer", "gap", "ratio", "clipped", "advantage")
    assert {len(trace[name]) for name in names} == {40}
    assert trace["gap"][:3] == [None] * 3 and trace["mask"][:4] == [0, 0, 0, 1]
    assert trace["worst"] == 20 and trace["gap"][20] == pytest.approx(-1.7)


def test_tokens_that_are_not_kept_are_a_sentence() -> None:
    run = FakeRun()
    row = int(np.flatnonzero(run.samples.columns["drop"] > 0)[0])
    headers = {"X-Penstock-Token": TOKEN}
    status, body = ask(lambda server: server.ask(f"/api/run/0/tokens/{row}", headers), run)
    assert status == 404 and "tokens of this answer are not kept" in body["error"]


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("run/0/samples?step=x", 400, "step must be like 2..5, got 'x'"),
        ("run/0/samples?sort=x", 400, "sort must be one of new, "),
        ("run/0/samples?limit=1000", 400, "limit must be between 0 and 200, got 1000"),
        ("run/0/sample/999999", 404, "there is no sample 999999"),
        ("run/0/group/999999", 404, "no sample of group 999999 is kept"),
        ("run/7/now", 404, "there is no run 7: 1 are shown"),
        ("run/0/curves?x=y", 400, "x must be one of step, time, tokens"),
    ],
)
def test_a_wrong_question_is_answered_with_a_sentence(path: str, status: int, reason: str) -> None:
    found, body = ask(lambda server: server.ask(f"/api/{path}", {"X-Penstock-Token": TOKEN}))
    assert found == status and body["error"].startswith(reason)


def test_curves_are_columns_of_buckets() -> None:
    run = FakeRun(num_steps=1000)
    found = ask(lambda server: server.get("run/0/curves", names="reward,kl,nothing", buckets="100"), run)
    x, low, high, mean = found["curves"]["reward"]
    assert list(found["curves"]) == ["reward", "kl"] and found["last"] == 1000
    assert len(x) == 100 and x[-1] == 1000
    assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))


def test_rewards_that_are_one_curve_are_named_so() -> None:
    run = FakeRun()
    reward = run.steps.column("reward")
    run.steps.names += ["reward_mean", "reward_exact", "reward_style"]
    run.steps._columns |= {"reward_mean": reward + 1e-9, "reward_exact": reward, "reward_style": reward / 2}
    found = ask(lambda server: server.get("run/0/metrics"), run)
    assert found["same"] == {"reward_mean": "reward", "reward_exact": "reward"}
    run.steps._columns["reward_exact"] = np.append(reward[:-1], 2.0)
    assert ask(lambda server: server.get("run/0/metrics"), run)["same"] == {"reward_mean": "reward"}


def test_now_says_how_the_run_is() -> None:
    run = FakeRun()
    found = ask(lambda server: server.get("run/0/now"), run)
    assert (found["ended"], found["last"], found["drops"]) == ("", STEPS, STEPS)
    assert found["status"]["bottleneck"]["who"] == "engines"
    assert found["reward_steps"] == 8
    run.is_running = False
    assert ask(lambda server: server.get("run/0/now"), run)["ended"] == "died"
    run.state.phase = "done"
    assert ask(lambda server: server.get("run/0/now"), run)["ended"] == "done"


def test_time_adds_up() -> None:
    found = ask(lambda server: server.get("run/0/time"))
    for process in found["processes"]:
        assert sum(seconds for _, seconds in process["parts"]) == pytest.approx(process["total_s"])
        assert sum(share for _, share in process["sums"]) == pytest.approx(1)
    assert dict(found["processes"][0]["sums"])["waited"] == 30 / 80


def test_ages_are_weighted_by_tokens() -> None:
    found = ask(lambda server: server.get("run/0/ages"))
    assert [bar["age"] for bar in found["bars"]] == [0, 1, 2, 3, 4]
    young, old = found["by_age"]
    assert (young["first"], young["last"], old["last"]) == (1, None, "3")
    run = FakeRun()
    shares, ess = run.steps.column("tokens_age_2_3"), run.steps.column("ess_age_2_3")
    assert old["ess"] == pytest.approx(float((shares * ess).sum() / shares.sum()))
    assert old.get("kl") is None
    assert old["gap_high"] == pytest.approx(1.0) and "gap_high" not in young


def test_drops_are_compared_with_what_was_kept() -> None:
    found = ask(lambda server: server.get("run/0/drops"))
    assert (found["total"], found["tokens"]) == (STEPS, STEPS * 20)
    assert found["rows"][0]["group"] > found["rows"][1]["group"]
    assert found["rows"][0]["sample"]["drop"] == "too old"
    assert sum(found["lengths"]["kept"]) == pytest.approx(1) == sum(found["lengths"]["dropped"])
    assert all(task["kept"] == 0 for task in found["tasks"])
    assert ask(lambda server: server.get("run/0/drops", reason="other"))["matched"] == 0


def test_a_timeline_is_a_stretch_with_arrows() -> None:
    found = ask(lambda server: server.get("run/0/timeline", time="2..4"))
    assert found["tracks"][0] == ["trainer", "step"] and found["names"] == ["step", "generate"]
    assert all(start <= 4 and end >= 2 for _, start, end, *_ in found["spans"])
    group = next(row[4] for row in found["spans"] if row[4] is not None)
    assert found["steps"][str(group)] == group // GROUPS
    engine = found["tracks"].index(["engine0", "slot 0"])
    assert [row[4] for row in found["spans"] if row[0] == engine] == [24]  # by the name of its request


def test_the_stream_tells_of_new_steps() -> None:
    async def hear(server: Server, run: FakeRun) -> list[Any]:
        url = f"http://127.0.0.1:{server.port}/api/live"
        async with server.session.get(url, headers={"X-Penstock-Token": TOKEN}) as stream:
            heard = [json.loads(await stream.content.readline())]
            run.add_step()
            while len(heard) < 2:
                line = await stream.content.readline()
                heard += [json.loads(line)] if line.strip() else []
            return heard

    async def main() -> list[Any]:
        run = FakeRun()
        async with served(run) as server, asyncio.timeout(20):
            return await hear(server, run)

    first, second = asyncio.run(main())
    assert first["now"]["last"] == STEPS and "rows" not in first
    assert second["rows"]["steps"] == [STEPS + 1]
    assert second["rows"]["values"]["reward"] == [FakeRun().steps.column("reward")[-1]]


def test_runs_are_compared_by_config_curves_and_answers() -> None:
    one, two = FakeRun("one"), FakeRun("two")
    two.config["staleness"]["max_staleness"] = 0
    found = ask(lambda server: server.get("compare", names="reward"), one, two)
    assert found["differences"] == [["staleness.max_staleness", [4, 0]]]
    assert [len(curve[0]) for curve in found["curves"]["reward"]] == [STEPS, STEPS]
    task = ask(lambda server: server.get("tasks", find="+"), one, two)["tasks"][0]
    answers = ask(lambda server: server.get("answers", task=task), one, two)
    assert [run["name"] for run in answers["runs"]] == ["one", "two"]
    assert {sample["task"] for run in answers["runs"] for sample in run["samples"]} == {task}


def test_half_of_a_surrogate_pair_does_not_break_an_answer() -> None:
    run = FakeRun()
    run.config["run"]["name"] = "a\ud800b"
    assert ask(lambda server: server.get("run/0/config"), run)["config"]["run"]["name"] == "a?b"
