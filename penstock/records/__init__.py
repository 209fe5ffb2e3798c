"""Defines the records that flow from stage to stage: frozen, aligned, and checked when they are made.

    Task ─► Turn… = Episode ─► Group ─► ScoredGroup ─► StepPlan ─► StepResult, WeightUpdate

Every record is a msgspec struct, so the same object travels inside a process and over a channel
(`penstock.records.codec` turns arrays into bytes). Nothing here imports torch.
"""

from penstock.records.answers import AnswerSoFar, joined_chunk
from penstock.records.base import (
    DEFAULT_POLICY,
    NOT_SAMPLED,
    BoolArray,
    FloatArray,
    IntArray,
    Record,
    check_aligned,
)
from penstock.records.blobs import (
    BlobRef,
    MaskRef,
    RoutingRef,
    RoutingShape,
    group_scope,
)
from penstock.records.episodes import (
    Episode,
    Group,
    Message,
    Sample,
    StepScore,
    Task,
    TokenColumn,
    Turn,
    TurnSpan,
    sample_of_turn,
    samples_of_turns,
)
from penstock.records.generation import (
    LEAST_TEMPERATURE,
    Chunk,
    EngineReport,
    FinishReason,
    GenerateRequest,
    Parent,
    SamplingMask,
    SamplingParams,
    since_restart,
)
from penstock.records.metrics import (
    Metric,
    merge_metrics,
    metric_values,
)
from penstock.records.partial_work import (
    CallAnswer,
    EpisodeScore,
    PartialGroup,
    TurnPart,
    WorkProgressed,
    blobs_of,
)
from penstock.records.scores import (
    Score,
    ScoredGroup,
)
from penstock.records.steps import (
    CheckpointWritten,
    StepPlan,
    StepResult,
    TracedTokens,
    TrainSequence,
)
from penstock.records.weights import (
    ONE_VERSION,
    AdapterSpec,
    Encoding,
    Interrupt,
    Payload,
    TensorSpec,
    UpdateReceipt,
    UpdateSelection,
    WeightUpdate,
)

__all__ = [
    "BoolArray",
    "FloatArray",
    "IntArray",
    "DEFAULT_POLICY",
    "LEAST_TEMPERATURE",
    "NOT_SAMPLED",
    "Record",
    "check_aligned",
    "BlobRef",
    "MaskRef",
    "RoutingRef",
    "RoutingShape",
    "group_scope",
    "FinishReason",
    "SamplingParams",
    "Parent",
    "GenerateRequest",
    "SamplingMask",
    "Chunk",
    "since_restart",
    "AnswerSoFar",
    "joined_chunk",
    "EngineReport",
    "Message",
    "Task",
    "Turn",
    "Sample",
    "Episode",
    "Group",
    "sample_of_turn",
    "samples_of_turns",
    "StepScore",
    "TokenColumn",
    "Score",
    "ScoredGroup",
    "TurnPart",
    "CallAnswer",
    "EpisodeScore",
    "PartialGroup",
    "blobs_of",
    "Metric",
    "merge_metrics",
    "metric_values",
    "TrainSequence",
    "TurnSpan",
    "StepPlan",
    "StepResult",
    "TracedTokens",
    "CheckpointWritten",
    "Interrupt",
    "ONE_VERSION",
    "AdapterSpec",
    "Encoding",
    "Payload",
    "TensorSpec",
    "WeightUpdate",
    "UpdateReceipt",
    "UpdateSelection",
    "WorkProgressed",
]
