"""One update from what several publishers say of it: the ranks of a trainer, each with its own slices."""

from collections.abc import Sequence

import msgspec

from penstock.types import TensorSpec, WeightUpdate

_MASK = (1 << 64) - 1


def join_updates(parts: Sequence[WeightUpdate]) -> WeightUpdate:
    """The tensors and buckets of all, and fingerprints that add up. Receivers check that together they are all of
    the model."""
    first = parts[0]
    headers = {(p.policy, p.version, p.transport, p.selection, p.base, p.adapter) for p in parts}
    if len(headers) > 1:
        raise ValueError(f"updates can be joined if they are of one version, got {sorted(map(str, headers))}")
    tensors: list[TensorSpec] = []
    buckets: list[str] = []
    fingerprint: dict[str, int] = {}
    for each in parts:
        tensors += [msgspec.structs.replace(spec, bucket=spec.bucket + len(buckets)) for spec in each.tensors]
        buckets += each.buckets
        for name, value in each.fingerprint.items():
            fingerprint[name] = (fingerprint.get(name, 0) + value) & _MASK
    return msgspec.structs.replace(
        first,
        tensors=tuple(tensors),
        buckets=tuple(buckets),
        payloads=tuple(payload for each in parts for payload in each.payloads),
        fingerprint=fingerprint,
        sends=any(each.sends for each in parts),
    )
