"""The `trainer` section: optimizer, schedule, precision and memory."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
OptimizerStates = Literal["float32", "8bit", "cpu"]
Gather = Literal["auto", "layer", "step"]


class ParallelConfig(Section):
    """How many ranks train together; each is a process, on a GPU of its own where there are GPUs."""

    data: int = Field(default=1, ge=1)
    """Copies of the trainer. Each trains on its part of a step, and gradients are summed."""
    shard: int = Field(default=1, ge=1)
    """Ranks that split weights, gradients and optimizer states among them (FSDP2). Each trains on its part of a
    step."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that split the matrices of each layer by transformers' plan for the model (tensor parallelism). They
    train on the same sequences."""
    context: int = Field(default=1, ge=1)
    """Ranks that split the tokens of each sequence (context parallelism), and the weights as `shard` does. For
    sequences that are too long for one GPU."""

    @property
    def num_ranks(self) -> int:
        return self.data * self.shard * self.context * self.tensor


class TrainerConfig(Section):
    """How steps are computed. What they optimise is in the `algorithm` section."""

    learning_rate: float = Field(default=1e-5, ge=0, le=1)
    """Peak learning rate of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay; matrices only, never norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's two averages."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What the learning rate does after the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """What cosine and linear fall towards, as a share of the peak; the last step is the one before it."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""
    max_skipped_updates: int = Field(default=10, ge=1)
    """The run ends when this many updates in a row were skipped because loss or gradient was not finite: the
    weights can't recover from that."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in; bfloat16 keeps float32 master weights. `auto`: bfloat16 on a GPU that computes
    in it, else float32."""
    optimizer_states: OptimizerStates = "float32"
    """AdamW's two averages: 8 bytes a parameter, 2 bytes, or in host memory together with the master weights, which
    costs time in every update."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens packed into one forward and backward pass; a longer sequence gets its own."""
    replay_reference: bool = False
    """Whether the model of a KL penalty computes with the recorded experts too. Otherwise it chooses its own."""
    shared_prompts: bool = True
    """Run what the sequences of a group begin with once per micro-batch instead of once per sequence."""
    passes: int = Field(default=1, ge=1)
    """Optimizer updates per step, each over all of its samples; more than one needs clipping."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at the same time."""
    checkpointing: Literal["off", "selective", "full"] = "off"
    """What the backward pass computes again instead of keeping it: nothing, what is cheap or wide, or whole
    layers."""
    compile: Literal["auto", "off", "on"] = "auto"
    """Fuse each layer, and 8-bit updates, with `torch.compile`: faster on a GPU, after about a minute at the
    start. `auto`: on for models of 100 million parameters and more on a GPU."""
    logprob_gap_warning: float = Field(default=0.05, gt=0)
    """Warn when the engine's and the trainer's logprobs of the same weights differ by more on average."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks that train together; one by default."""
    gather: Gather = "auto"
    """When split weights come together (`shard`, `context`): those of a `layer` whenever it runs, or all of them
    once for a `step`, which gathers less often. Every rank then holds all weights in the format of the forward pass
    until the update. `auto`: `step` on GPUs that have room for it, else `layer`."""
    threads: int = Field(default=0, ge=0)
    """Threads of the trainer process on a CPU; 0 leaves the choice to torch."""
