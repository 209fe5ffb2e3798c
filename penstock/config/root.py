"""Defines the root config: every part's section under one name. `penstock init` writes it with comments."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.algorithms.config import AlgorithmConfig
from penstock.config import Section
from penstock.config.repeatable import conflicts, with_implied
from penstock.config.unresolved import AUTO
from penstock.engines.config import EngineConfig
from penstock.errors import ConfigError
from penstock.loop.config import StalenessConfig
from penstock.models.config import ModelConfig
from penstock.observe.config import ObserveConfig
from penstock.processes.launchers.config import LauncherConfig
from penstock.records import LEAST_TEMPERATURE
from penstock.rollout.config import RolloutConfig
from penstock.scoring.config import RewardConfig
from penstock.sync.config import SyncConfig
from penstock.tasks.config import TasksConfig
from penstock.trainer.config import TrainerConfig

LEAST_FREEZE_S = 2.0
MAX_EPISODES = 1 << 20
"""The most episodes of one step."""


class RunConfig(Section):
    """Sets how long a run is, where its files go, and how it is restarted and resumed."""

    name: str = "run"
    """The run's name. Its folder is `folder/name`, with a number appended if that exists."""
    folder: Path = Path("runs")
    """Where run folders go."""
    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0)
    """Seed of the task order and of every sampled token."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between two checkpoints, from which `penstock resume` continues; one more is written at the end.
    0 writes none. Training continues while one is written. A checkpoint takes up to 16 bytes per parameter on
    the disk, and as much host memory for the copy that is written."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the last checkpoints are kept. The one with the highest held-out reward is also kept, if
    `eval.every` is a multiple of `checkpoint_every`."""

    journal: bool = True
    """In a run with checkpoints: keep a journal of every group, so that `penstock resume` continues with finished
    groups and `penstock doctor` shows what became of each. Off: a resumed run generates them again."""

    journal_every_s: float = Field(default=2.0, gt=0)
    """In a run with a journal: seconds between two records of unfinished answers. After a crash they continue
    from the last record, and what was sampled since then is sampled again."""

    deterministic: bool = False
    """Make every step repeat bit by bit: a run that was killed and resumed ends with the same weights as one
    that was not, on the same machine. It runs on a CPU, synchronously, one answer at a time. This sets
    `model.device=cpu`, `staleness.max_staleness=0`, `engine.embedded.max_batch=1` and
    `engine.embedded.prefix_cache=false` unless the config sets them. The step under way is discarded, so no
    journal is kept. Rewards must return the same value each time, within their time limits."""

    @field_validator("name")
    @classmethod
    def _name_stays_in_folder(cls, name: str) -> str:
        if not name.strip() or name in (".", "..") or any(char in "/\\" or ord(char) < 32 for char in name):
            raise ValueError(
                "run.name must be the name of a folder, without separators or control characters"
            )
        return name

    restarts: int = Field(default=4, ge=0)
    """How often in a row a worker that dies is restarted before the run ends. The count starts anew when an
    engine or trainer has worked for a minute, or a scoring or rollout worker has done a call. Tasks that kill
    their process are counted separately: the run ends when more tasks in a row do so than this, and more than
    are under way."""

    freeze_s: float = Field(default=120.0, ge=0)
    """A worker that is silent for this long counts as frozen: it is killed and replaced. It may be silent for
    longer where it has announced that, as for loading or compiling. An engine whose server (vLLM's) returns no
    token for this long while answers are under way counts as frozen too. 0: no worker counts as frozen."""

    @field_validator("freeze_s")
    @classmethod
    def _outlasts_a_pulse(cls, seconds: float) -> float:
        if 0 < seconds < LEAST_FREEZE_S:
            raise ValueError(f"must be 0, or at least {LEAST_FREEZE_S:g}: workers report every half second")
        return seconds

    start_s: float = Field(default=1800.0, gt=0)
    """How long an engine or trainer may take to start, including loading and compiling. Past it, it is killed
    and started again."""

    max_failed_in_a_row: int = Field(default=0, ge=0)
    """End the run with an error when this many groups in a row failed (a reward that raises, requests that the
    engine refuses). 0: four steps' worth, at least 16, and more than can be under way at once."""


class PlacementConfig(Section):
    """Sets which GPUs of this machine the trainer and the engines get, and how they share one."""

    trainer: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the trainer, by their numbers among those that this process sees: `[0, 1]`. There is one rank
    per GPU; several ranks split the weights (`trainer.parallel.shard`) unless `trainer.parallel` says
    otherwise. Empty: one GPU for each rank if `engines` is set; otherwise as few as hold the trainer if engines
    get other GPUs, else the GPU of `model.device`."""
    engines: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the engines, one each, or `engine.vllm.tensor_parallel` each. If `engine.count` is not set,
    there are as many engines as fit on these. Empty: the GPUs that the trainer leaves free; for small models
    without `trainer`, the trainer's."""
    share: Literal["auto", "mps", "time"] = "auto"
    """`mps`: both run at the same time, through an MPS daemon that the run starts and stops. `time`: they take
    turns, which gains little over running one after the other. `auto`: `mps` where trainer and engines share a
    GPU and training is asynchronous; without `nvidia-cuda-mps-control` the log says so and they take turns."""
    first: Literal["engine", "trainer", "none"] = "engine"
    """Under MPS, whose kernels go first when both wait for room on the GPU. `engine`: generation keeps about
    half of its speed beside training, and the total throughput is highest. `trainer`, `none`: generation
    keeps less, down to a third."""

    @field_validator("trainer", "engines")
    @classmethod
    def _names_each_once(cls, numbers: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"each GPU must be named once, got {list(numbers)}")
        return numbers


class EvalConfig(Section):
    """Sets held-out evaluation: at the start, at the end and in between."""

    tasks: TasksConfig | None = None
    """Held-out tasks; unset evaluates nothing."""
    every: int = Field(default=0, ge=0)
    """Steps between two evaluations beside training; 0 evaluates only at the start and at the end."""
    samples: int = Field(default=1, ge=1, le=65536)
    """Answers per held-out task."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; unset takes the rollout's, 0 is greedy."""

    @field_validator("temperature")
    @classmethod
    def _can_be_divided_by(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, or at least {LEAST_TEMPERATURE:g}")
        return temperature


class PenstockConfig(Section):
    """Holds all settings of a run."""

    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    staleness: StalenessConfig = StalenessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    placement: PlacementConfig = PlacementConfig()
    launcher: LauncherConfig = LauncherConfig()
    run: RunConfig = RunConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_what_repeating_implies(cls, sections: Any) -> Any:
        run = sections.get("run") if isinstance(sections, dict) else None
        is_repeatable = (
            run.get("deterministic") if isinstance(run, dict) else getattr(run, "deterministic", None)
        )
        return with_implied(sections) if is_repeatable is True else sections

    @model_validator(mode="after")
    def _sections_fit(self) -> "PenstockConfig":
        if self.rollout.group_size == 1 and self.algorithm.needs_group:
            raise ValueError(
                f"rollout.group_size must be at least 2, got 1: the advantage {self.algorithm.advantage!r} "
                "compares the episodes of a group with each other"
            )
        if (
            self.algorithm.advantage == "reinforce_pp"
            and self.rollout.group_size * self.rollout.groups_per_step == 1
        ):
            raise ValueError(
                "a step must have at least 2 episodes (rollout.group_size x rollout.groups_per_step), got 1: the "
                "advantage 'reinforce_pp' compares the episodes of a step with each other"
            )
        if (episodes := self.rollout.group_size * self.rollout.groups_per_step) > MAX_EPISODES:
            raise ValueError(
                f"a step must have at most {MAX_EPISODES:,} episodes (rollout.group_size x "
                f"rollout.groups_per_step), got {episodes:,}"
            )
        bound = self.staleness.adaptive_min if self.staleness.adaptive else self.staleness.max_staleness
        if self.sync.every > bound + 1:
            raise ValueError(
                f"sync.every must be at most {bound + 1}, got {self.sync.every}: engines would sample tokens older "
                f"than the bound of {bound} updates; raise staleness.max_staleness"
                + (" and adaptive_min" if self.staleness.adaptive else "")
            )
        if self.engine.dtype != AUTO:
            self.check_wire_dtype()
        if self.run.deterministic and (needed := conflicts(self)):
            raise ValueError(f"run.deterministic=true needs {', '.join(needed)}")
        heldout = self.eval.tasks
        if heldout is not None and heldout.template_args not in ({}, self.tasks.template_args):
            raise ValueError("eval.tasks.template_args must be unset or equal tasks.template_args")
        return self

    def check_wire_dtype(self) -> None:
        """Refuse a `sync.dtype` that engines can't hold. Called once their `engine.dtype` is known."""
        sent, held = self.sync.dtype, self.engine.dtype
        if sent not in ("engine", held) and held != "float32":
            raise ConfigError(
                f"sync.dtype must be engine, or what engines of {held} hold without loss, got {sent}: every engine "
                "must hold the bits that were sent; set engine.dtype=float32, or leave sync.dtype"
            )
