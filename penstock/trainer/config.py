"""The `trainer` section sets optimizer, schedule, precision and memory."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.config import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
OptimizerStates = Literal["float32", "8bit", "cpu"]
Gather = Literal["auto", "layer", "step"]


class ParallelConfig(Section):
    """Sets how many ranks train together. Each rank is a process, with a GPU of its own where there are GPUs."""

    data: int = Field(default=1, ge=1, le=4096)
    """Copies of the trainer (data parallelism). Each trains on its part of a step, and gradients are summed."""
    shard: int = Field(default=1, ge=1, le=4096)
    """Ranks that split weights, gradients and optimizer states among them (FSDP2). Each trains on its part of a
    step."""
    tensor: int = Field(default=1, ge=1, le=4096)
    """Ranks that split the matrices of each layer by transformers' plan for the model (tensor parallelism). They
    train on the same sequences."""
    context: int = Field(default=1, ge=1, le=4096)
    """Ranks that split the tokens of each sequence (context parallelism), and the weights as `shard` does. For
    sequences that are too long for one GPU."""

    @property
    def num_ranks(self) -> int:
        return self.data * self.shard * self.context * self.tensor


class TrainerConfig(Section):
    """Sets how steps are computed. What they optimise is in the `algorithm` section."""

    elsewhere: ClassVar[dict[str, str]] = dict.fromkeys(
        ("batch_size", "train_batch_size", "global_batch_size", "mini_batch_size"),
        "a step trains on rollout.group_size x rollout.groups_per_step answers",
    )

    learning_rate: float = Field(default=1e-5, ge=0, le=1)
    """Peak learning rate of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay; matrices only, never norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's two moving averages."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate changes after the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The share of the peak that cosine and linear would reach one step after the last one."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""
    max_skipped_updates: int = Field(default=10, ge=1)
    """The run ends when this many updates in a row were skipped because loss or gradient was not finite: the
    weights can't recover from that."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The number format that the model computes in; bfloat16 keeps float32 master weights. `auto` is bfloat16 on a
    GPU that supports it, else float32."""
    optimizer_states: OptimizerStates = "float32"
    """How AdamW's two averages are kept: `float32` takes 8 bytes per parameter, `8bit` takes 2, and `cpu` keeps
    them in host memory together with the master weights, which costs time in every update."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens packed into one forward and backward pass; a longer sequence gets a pass of its own."""
    replay_reference: bool = False
    """Whether the reference model of a KL penalty uses the recorded experts too; otherwise it chooses its own."""
    shared_prompts: bool = True
    """Compute the prompt that sequences of a group share once per micro-batch instead of once per sequence."""
    passes: int = Field(default=1, ge=1, le=1000)
    """Optimizer updates per step, each over all of its samples; more than one needs clipping."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """The number of tokens whose logits are in memory at the same time."""
    checkpointing: Literal["off", "selective", "full"] = "off"
    """Activations that the backward pass recomputes instead of keeping them: none (`off`), cheap or wide ones
    (`selective`), or whole layers (`full`)."""
    compile: Literal["auto", "off", "on"] = "auto"
    """Fuse each layer, and 8-bit updates, with `torch.compile`: faster on a GPU, after about a minute at the
    start. `auto` is on for models of 100 million parameters and more on a GPU."""
    logprob_gap_warning: float = Field(default=0.05, gt=0)
    """Warn when the engine's and the trainer's logprobs of the same weights differ by more on average."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks that train together; one by default."""
    gather: Gather = "auto"
    """When ranks gather split weights (`shard`, `context`): those of a `layer` whenever it runs, or all of them
    once per `step`. With `step`, every rank holds all weights in the format of the forward pass until the update.
    `auto` is `step` on GPUs that have room for it, else `layer`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of the trainer process on a CPU; 0 leaves the choice to torch."""
