"""Joins the updates of several publishers into one: the ranks of a trainer, each with its own slices."""

from collections.abc import Sequence

import msgspec

from penstock.records import TensorSpec, WeightUpdate

_MASK = (1 << 64) - 1


def join_updates(parts: Sequence[WeightUpdate]) -> WeightUpdate:
    """Return one update with the tensors and buckets of all parts, and the sums of their fingerprints. Buckets
    take turns, so that no publisher waits until another has sent all of its own. Receivers check that
    together they are the whole model."""
    first = parts[0]
    headers = {(p.policy, p.version, p.transport, p.selection, p.base, p.adapter) for p in parts}
    if len(headers) > 1:
        raise ValueError(f"updates can be joined if they are of one version, got {sorted(map(str, headers))}")
    turns = sorted((number, at) for at, each in enumerate(parts) for number in range(len(each.buckets)))
    placed = {(at, number): place for place, (number, at) in enumerate(turns)}
    tensors: list[TensorSpec] = []
    fingerprint: dict[str, int] = {}
    for at, each in enumerate(parts):
        tensors += [msgspec.structs.replace(spec, bucket=placed[at, spec.bucket]) for spec in each.tensors]
        for name, value in each.fingerprint.items():
            fingerprint[name] = (fingerprint.get(name, 0) + value) & _MASK
    return msgspec.structs.replace(
        first,
        tensors=tuple(tensors),
        buckets=tuple(parts[at].buckets[number] for number, at in turns),
        payloads=tuple(parts[at].payloads[number] for number, at in turns if parts[at].payloads),
        fingerprint=fingerprint,
        sends=any(each.sends for each in parts),
    )
