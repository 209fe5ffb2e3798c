"""Compiles kernels for a GPU that need not be there, and prints what became of each, as JSON.

    python -m tests.engines.embedded.cuda.kernels.compiled

Triton's interpreter takes what its compiler refuses, and the gate can't be interpreted at all. A process of its own,
because whether kernels are interpreted is settled when Triton is imported."""

import json
import os
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.engines.embedded.cuda.kernels import decode_attention as decode
from penstock.engines.embedded.cuda.kernels import expert_record, low_rank, sampling
from penstock.engines.embedded.cuda.kernels import step_end as kernels
from penstock.engines.embedded.cuda.kernels import truncated_sampling as truncation
from penstock.sync import hash_kernel as weights

HOPPER = GPUTarget("cuda", 90, 32)
INTEGERS = (
    "counts",
    "ids",
    "sources",
    "arena",
    "cursor",
    "sizes",
    "mask_places",
    "kept",
    "tables",
    "slots",
    "tiles",
)
LONG = (
    "asked", "opened", "device_report", "versions", "policies", "output_versions", "newest", "seeds", "places", "tokens", "top_k", "drawn",
    "positions", "records", "step_at", "step", "stops", "output_tokens", "addresses", "targets", "owners", "starts",
    "sums",
)  # fmt: skip
FLOATS = (
    "facts", "scores", "shrunk", "scales", "temperature", "top_p", "min_p", "logprobs", "thresholds", "partial", "output_logprobs",
)  # fmt: skip
NARROW = ("logits", "query", "key", "value", "pool", "sinks", "out", "states", "a", "b", "output")
SCALARS = {"scaling": "fp32", "softcap": "fp32", "patience_ns": "i64"}


def type_of(name: str) -> str:
    """A type by the name of the argument, the same in all kernels; numbers are integers where nothing is said."""
    for names, kind in ((INTEGERS, "*i32"), (LONG, "*i64"), (FLOATS, "*fp32"), (NARROW, "*bf16")):
        if name in names:
            return kind
    return {"ended": "*i32", "lengths": "*i32", **SCALARS}.get(name, "i32")


def assembly(
    kernel: Any, warps: int, *, stages: int = 3, types: dict[str, str] | None = None, **constants: Any
) -> str:
    """As a kernel is launched: tensors begin where allocations do. `types`: of arguments that have another one here."""
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    signature |= types or {}
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})
    return str(made.asm["ptx"])


def all_kernels() -> Iterator[tuple[str, str]]:
    answers = {name: getattr(kernels, name) for name in ("STOPPED", "WAITED_NS", "RESUMED", "GAVE_UP")}
    yield "gate", assembly(kernels._gate_kernel, 1, **answers)
    yield "advance", assembly(kernels._advance_kernel, 8, STOPS=kernels.STOPS, SIZE=512, POLICIES=1)
    wide = dict.fromkeys(("ids", "chosen", "slots"), "*i64")
    for name, decodes in (("record, decoding", True), ("record, prompts", False)):
        yield (
            name,
            assembly(
                expert_record._record_kernel,
                4,
                types={**wide, "record": "*u8"},
                TOP_K=8,
                PADDED_K=8,
                ROWS=expert_record.ROWS,
                DECODES=decodes,
            ),
        )
    draws = {
        "draw": {"TRUNCATES": False, "MAPPED": False, "RECORDS": False},
        "draw truncated": {"TRUNCATES": True, "MAPPED": False, "RECORDS": True},
        "draw from candidates": {"TRUNCATES": True, "MAPPED": True, "RECORDS": True},
    }
    for name, flags in draws.items():
        size = sampling.CANDIDATES if flags["MAPPED"] else sampling.LANES
        yield (
            name,
            assembly(
                sampling._draw_kernel,
                8 if flags["MAPPED"] else 4,
                types={"logits": "*fp32"} if flags["MAPPED"] else None,
                SOURCES=True,
                SIZE=size,
                TURNS=256 if size == 1024 else size,
                **flags,
            ),
        )
    size = {"SIZE": sampling.LANES, "TURNS": 64, "CANDIDATES": sampling.CANDIDATES}
    yield "narrow", assembly(truncation.narrow_kernel, 4, SOURCES=True, **size)
    heads = {"DK": 128, "DK_PAD": 128, "DV": 128, "DV_PAD": 128}
    flags = {
        "BLOCK_SIZE": 16,
        "LINES": decode.LINES,
        "POOL_TOKEN": 1024,
        "POOL_HEAD": 256,
        "SOFTCAP": True,
        "WINDOW": True,
        "SINKS": True,
        "PRECISION": "tf32",
    }
    for splits, pack, stages in ((1, 1, 4), (1, 2, 4), (4, 2, 7)):
        group = {"GROUP": 7 // pack, "PACK": pack, "SLOT": decode.QUERIES // pack}
        name = f"decode, {splits} splits, {pack} heads together"
        kinds = {"SPLITS": splits, **group}
        yield name, assembly(decode._decode_kernel, 1, stages=stages, **kinds, **heads, **flags)
    slots = {"SUMS": 48, "NUM_SLOTS": 2, "PRECISION": "tf32"}
    tiles = {"ROWS": 16, "SUMS_TILE": 64, "DEPTH": 128, "STATE_ROW": 1536, "A_SLOT": 48 * 1536}
    yield "shrink", assembly(low_rank._shrink_kernel, 4, WIDTH=1536, SPLIT=384, **slots, **tiles)
    tiles = {"ROWS": 32, "COLUMNS": low_rank.COLUMNS, "SPLITS": 4, "OUTPUT_ROW": 2048, "B_SLOT": 2048 * 16}
    ranks = {"RANK": 16, "RANK_TILE": 16, "ALIGNED": True}
    yield "expand", assembly(low_rank._expand_kernel, 4, **ranks, **slots, **tiles)
    mixing = {name: getattr(weights, name) for name in ("FACTOR", "WALK", "CARRY", "SPAN")}
    flags = {"COPIES": True, "STRIDE": weights.walk_from(weights.BLOCK), "WIDTH": 2, "ALIGNED": True}
    sizes = {"SIZE": weights.BLOCK, "types": {"sizes": "*i64"}}
    yield "copy and fingerprint", assembly(weights._sum_kernel, weights.WARPS, **mixing, **flags, **sizes)


if __name__ == "__main__":
    found = {}
    for name, text in all_kernels():
        found[name] = {
            word: text.count(word)
            for word in (
                "ld.volatile",
                "fence.acq_rel.sys",
                "globaltimer",
                "ex2.",
                "mma.",
                "ld.global.v4.b32",
                "st.global.v4.b32",
                "cp.async",
            )
        }
    print(json.dumps(found))
