"""Every error Penstock raises on purpose. Each says what, the rule, what it got, and the fix."""


class PenstockError(Exception):
    """Base of all our errors."""


class UserError(PenstockError):
    """Something the user can mend: the CLI prints it as one sentence and exits with code 2."""


class ConfigError(UserError):
    """A config file, section or override is wrong."""


class TaskError(UserError):
    """Tasks could not be loaded or do not fit the model."""


class MissingExtraError(UserError):
    """An optional dependency is needed and absent: the message names the extra to install."""


class RequestRefused(PenstockError):
    """A request can never be served: too long for an engine's cache, a capability it lacks, a message too large."""


class NonFiniteLogits(RequestRefused):
    """The model's logits for this request are not finite, so there is nothing to draw from."""


class Diverged(UserError):
    """Training has broken the weights: losses or gradients are not finite, step after step."""


class OutOfMemory(UserError):
    """A device, or what a process may take of the host, had no room left. The message names settings to turn."""


class StepTooLarge(OutOfMemory):
    """The same in the middle of a step, before it changed anything: with smaller micro-batches it may fit."""


class DiskFull(UserError):
    """The disk has no room for a file. The message names it, and says what it needs."""


class WorkerDied(PenstockError):
    """A worker process ended without being asked to. `detail` is what it left behind (its traceback)."""

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
    """An engine has lost what it computes with: its server died, or its weights are half old, half new. Requests
    may begin again elsewhere, and it may come back."""


class TrainerLost(ChannelClosed):
    """The trainer's process is gone. Another one will go on from its last checkpoint."""


class FingerprintMismatch(PenstockError):
    """An engine's live parameters are not the weights that the trainer published."""


class DamagedBucket(PenstockError):
    """Published weights did not arrive as they were sent. The engine goes on with those that it has."""


class BaseMissing(PenstockError):
    """An update holds only what has changed, and the engine does not serve the version that it builds on. It needs
    a full one."""


class SnapshotReplaced(PenstockError):
    """A version can't be published any more: the trainer has put newer weights in the place of its snapshot."""


class UpdateAbandoned(PenstockError):
    """Somebody else failed to take an update that all take together. Nothing has changed here."""


class BlobLost(PenstockError):
    """Bulk data that a record refers to can't be written or read back: its group is dropped with this as reason."""


class RolloutFailed(PenstockError):
    """Too few episodes of a group were good; `reason` is the drop reason that is counted."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ScoringFailed(PenstockError):
    """A scorer could not score a group; `reason` is the drop reason that is counted."""

    def __init__(self, message: str, reason: str, detail: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.detail = detail
