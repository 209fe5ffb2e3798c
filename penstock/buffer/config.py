"""The `staleness` section: how old a token may be when it is trained on."""

from typing import Literal

from pydantic import Field

from penstock.config import Section


class StalenessConfig(Section):
    """How old a token may be when it is trained on."""

    max_staleness: int = Field(default=4, ge=0)
    """The bound, in updates between the weights that sampled a token and the weights that train on it.
    0 is exactly synchronous, on-policy training."""
    late: Literal["mask", "wait", "drop", "correct"] = "mask"
    """What happens to tokens that cross the bound: `mask` takes them out of the loss, `wait` makes the
    trainer wait for groups that are about to cross, `drop` discards their group and gives its task back
    (biased against long answers), `correct` trains on them with importance weights: the bound is soft."""
    ahead: int = Field(default=1, ge=1)
    """Steps' worth of finished groups that may wait for the trainer. Generating further ahead would not
    make training faster, only its tokens older."""
    filter_zero_variance: bool = False
    """Drop groups whose episodes all have the same score, and generate others in their place."""
    max_filtered_in_a_row: int = Field(default=512, ge=1)
    """End the run when this many groups in a row had zero variance: nothing is left to learn from."""
