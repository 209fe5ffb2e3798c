"""Defines every error that Penstock raises on purpose. Each message says what is wrong, the rule, what it got,
and the fix."""


class PenstockError(Exception):
    """Is the base class of all Penstock errors."""


class UserError(PenstockError):
    """Reports something that the user can fix: the CLI prints it as one sentence and exits with code 2."""


class ConfigError(UserError):
    """A config file, section or override is wrong."""


class TaskError(UserError):
    """Tasks could not be loaded or do not fit the model."""


class MissingExtraError(UserError):
    """An optional dependency is needed and not installed. The message names the extra to install."""


class RequestRefused(PenstockError):
    """A request can never be served: too long for an engine's cache, a capability it lacks, a message too large."""


class NonFiniteLogits(RequestRefused):
    """The model's logits for this request are not finite, so no token can be sampled."""


class Diverged(UserError):
    """Training has broken the weights: losses or gradients are not finite, step after step."""


class OutOfMemory(UserError):
    """A device, or the process's share of host memory, is full. The message names settings to change."""


class StepTooLarge(OutOfMemory):
    """A step ran out of memory before it changed anything. It may fit with smaller micro-batches."""


class DiskFull(UserError):
    """The disk has no room for a file. The message names the file and the room that it needs."""


class WorkerDied(PenstockError):
    """A worker process ended without being asked to. `detail` is the end of its output."""

    def __init__(self, message: str, detail: str = "", *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        self.out_of_memory = out_of_memory


class RemoteError(PenstockError):
    """The other side of a channel raised; `detail` is its traceback."""

    def __init__(self, message: str, kind: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.detail = detail


class ChannelClosed(PenstockError):
    """The other side of a channel is gone."""


class EngineLost(PenstockError):
    """An engine can't compute any more: its server died, or its weights are half old, half new. Its requests may
    start again on another engine, and it may come back."""


class TrainerLost(ChannelClosed):
    """The trainer's process is gone. Another process will resume from its last checkpoint."""


class FingerprintMismatch(PenstockError):
    """An engine's live parameters are not the weights that the trainer published."""


class DamagedBucket(PenstockError):
    """Published weights arrived damaged. The engine keeps serving the weights that it has."""


class BaseMissing(PenstockError):
    """An update holds only changes to a version that the engine does not serve. The engine needs a full update."""


class SnapshotReplaced(PenstockError):
    """A version can't be published any more: newer weights of the trainer have replaced its snapshot."""


class UpdateAbandoned(PenstockError):
    """Another participant failed to take an update that all take together. Nothing has changed here."""


class BlobLost(PenstockError):
    """Bulk data that a record refers to can't be written or read back. Its group is dropped with this as the
    reason."""


class RolloutFailed(PenstockError):
    """Too many episodes of a group failed; `reason` is the drop reason that is counted."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ScoringFailed(PenstockError):
    """A scorer could not score a group; `reason` is the drop reason that is counted."""

    def __init__(self, message: str, reason: str, detail: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.detail = detail
