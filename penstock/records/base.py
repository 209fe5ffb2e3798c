"""Defines the base of all records, and their array types."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

DEFAULT_POLICY = "policy"
NOT_SAMPLED = -1
"""`versions[i]` where the policy did not sample token i (prompt, tool output)."""


class Record(msgspec.Struct, frozen=True, eq=False):
    """Is the base of all records. Equality is identity, since arrays have no single truth value.

    Each record repeats `frozen` and `kw_only`, since type checkers do not see them inherited.
    """


def check_aligned(what: str, *columns: Any) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"{what}: its columns must have one length, got {lengths}")
