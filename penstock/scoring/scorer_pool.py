"""Scores on worker processes: a call is one episode, or one group where a function needs the group."""

from collections.abc import Callable, Sequence

from penstock.channel.pooled_calls import CallKind, CallLost, PoolWorker
from penstock.channel.worker_pool import MAX_DEATHS_IN_A_ROW, START_S, WorkerPool
from penstock.errors import RemoteError, RequestRefused, ScoringFailed, WorkerDied
from penstock.records import Episode, Group, Score, Task
from penstock.scoring.reward_calls import SCORE_ERROR
from penstock.scoring.scoring_process import ScoringRequest, TrainerState, Verdict
from penstock.scoring.thread_scorer import TIMEOUT, refuse_if_group_is_needed, timed_out

WORKER_DIED = "score_worker_died"
"""The worker's process ended while it was scoring."""
TOO_LARGE = "score_too_large"
"""A call or its answer is larger than a message may be."""
RECORD_BYTES = 256
"""Estimated size of a record without its arrays and text."""


class ScorerPool:
    """Scores on a worker pool with a time limit per call, as a `penstock.records.interfaces.Scorer`. Each worker
    is listed with the number of messages that it takes at once."""

    def __init__(
        self,
        workers: Sequence[tuple[PoolWorker[ScoringRequest, Verdict], int]],
        *,
        needs_group: bool,
        timeout_s: float,
        start_s: float = START_S,
        max_deaths: int = MAX_DEATHS_IN_A_ROW,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.needs_group = needs_group
        self.training: Callable[[], TrainerState] = TrainerState
        """Returns how far training is. The run sets it."""
        kind: CallKind[ScoringRequest, Verdict] = CallKind(
            worker="scoring",
            advice="look at the reward functions, and at what ends processes on this machine (reward.memory_gb, "
            "reward.cpu_s)",
            task=lambda call: (call.task.id, call.episodes[0].index, f"scoring task {call.task.id!r}"),
            limit_s=lambda call: timeout_s,
            late=lambda call: str(timed_out(call.task, timeout_s)),
            blames_late=True,
            leaves=True,  # killing the process would cost the calls queued behind it far more
            seconds=lambda verdict: verdict.seconds,
            num_bytes=_num_bytes,
        )
        self._pool = WorkerPool(workers, kind, start_s=start_s, max_deaths=max_deaths, report=report)

    async def score(self, group: Group) -> tuple[Score, ...]:
        return await self._score(self._request(group.task, group.episodes))

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        refuse_if_group_is_needed(self.needs_group)
        return (await self._score(self._request(task, (episode,))))[0]

    async def close(self) -> None:
        await self._pool.close()

    async def lost(self, number: int, death: WorkerDied) -> None:
        await self._pool.lost(number, death)

    def _request(self, task: Task, episodes: tuple[Episode, ...]) -> ScoringRequest:
        return ScoringRequest(task=task, episodes=episodes, training=self.training())

    async def _score(self, request: ScoringRequest) -> tuple[Score, ...]:
        try:
            verdict = await self._pool.ask(request)
        except CallLost as error:
            reason = TIMEOUT if error.is_late else WORKER_DIED
            raise ScoringFailed(str(error), reason, error.detail) from None
        except RequestRefused as error:
            raise _too_large(request, error) from error
        except RemoteError as error:
            raise ScoringFailed(str(error), SCORE_ERROR, error.detail) from error
        if verdict.reason:
            raise ScoringFailed(verdict.message, verdict.reason, verdict.detail)
        return verdict.scores


def _too_large(request: ScoringRequest, error: RequestRefused) -> ScoringFailed:
    return ScoringFailed(
        f"scoring task {request.task.id!r} takes too large a message ({error}); make episodes shorter, or score "
        "each by itself where the reward takes a group",
        TOO_LARGE,
    )


def _num_bytes(request: ScoringRequest) -> int:
    """Estimate the size of a request in a message. Columns of the task are not counted: that would cost more
    than sending a message in vain."""
    total = RECORD_BYTES
    for episode in request.episodes:
        for turn in episode.turns:
            # Ids, logprobs and versions of its output tokens are three arrays of 4 bytes each.
            total += turn.prompt_ids.nbytes + 3 * turn.output_ids.nbytes + len(turn.text) + RECORD_BYTES
            total += RECORD_BYTES * (len(turn.sampling_masks) + len(turn.routing))
    return total
