"""A pass over compiled layers, before kernels are made of them: what ours do on the side is taken out.

What is only multiplied to be added to something is added by the product: a layer of a transformer does so twice, at
the end of attention and at the end of its MLP. Queries and keys that are only turned by their places to be attended
with are turned by attention. No model is known by name: what is written in another way stays as it is.
"""

from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from penstock.engines.embedded.cuda import device_attention as attention
from penstock.engines.embedded.cuda import products

aten = torch.ops.aten


class LayerPass(CustomGraphPass):
    """Turns `attend_paged(rotated(q), rotated(k), …)` into `attend_paged(q, k, …, cos, sin)` and, where asked to,
    `a + product(x, weight)` into `sum_with_product(a, x, weight)`."""

    def __init__(self, *, join_additions: bool) -> None:
        self._joins_additions = join_additions

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=auto_functionalized_v2):
            if node.args[0] is torch.ops.penstock.attend_paged.default:
                _rotate_inside(graph, node)
        if self._joins_additions:
            for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
                if node.kwargs.get("alpha", 1) == 1:
                    _join(graph, node)

    def uuid(self) -> Any:
        """Compiled code is kept by this."""
        files = (__file__, str(attention.__file__), str(products.__file__))
        return get_hash_for_files(files, str(self._joins_additions))


class Rotation(NamedTuple):
    """`x * cos + cat(-right half, left half of x) * sin`, for one row of tokens."""

    x: Node
    """(1, heads, tokens, dim)."""
    cos: Node
    """(1, tokens, dim), as `sin`."""
    sin: Node


def _rotate_inside(graph: Graph, attend: Node) -> None:
    names = ("query", "key")
    before: dict[str, Any] = {name: attend.kwargs[name] for name in names}
    found = [_rotation(before[name]) for name in names]
    query, key = found
    if query is None or key is None or query[1:] != key[1:] or attend.kwargs["cos"] is not None:
        return
    changed: dict[str, Any] = dict(attend.kwargs)
    with graph.inserting_before(attend):
        for name, rotation in zip(names, (query, key), strict=True):
            row = _call(graph, aten.select.int, rotation.x, 0, 0)
            changed[name] = _call(graph, aten.permute.default, row, [1, 0, 2])
        for name, angles in (("cos", query.cos), ("sin", query.sin)):
            changed[name] = _call(graph, aten.select.int, angles, 0, 0)
    attend.kwargs = changed
    # The strides that operands must have, as they were before the compiler touched them.
    if "eager_input_vals" in attend.meta:
        args, values = attend.meta["eager_input_vals"]
        news = {name: changed[name].meta["val"] for name in (*names, "cos", "sin")}
        attend.meta["eager_input_vals"] = args, {**values, **news}
    for node in dict.fromkeys(before.values()):
        _erase_unused(graph, node)


def _rotation(turned: Any) -> Rotation | None:
    """What `turned`, (tokens, heads, dim), is made of, if it is that and nothing else reads it."""
    try:
        row, order = _args(turned, aten.permute.default)
        batch, *first = _args(row, aten.select.int)
        straight, across = _args(batch, aten.add.Tensor)
        x, cos = _args(straight, aten.mul.Tensor)
        swapped, sin = _args(across, aten.mul.Tensor)
        halves, dim = _args(swapped, aten.cat.default)
        negative, left = halves
        (right,) = _args(negative, aten.neg.default)
        cos, *over_heads = _args(cos, aten.unsqueeze.default, alone=False)
        sin, *also_over_heads = _args(sin, aten.unsqueeze.default, alone=False)
        _, _, tokens, size = x.meta["val"].shape
        is_one = (
            (list(order), first, dim) == ([1, 0, 2], [0, 0], -1)
            and over_heads == also_over_heads == [1]
            and _args(left, aten.slice.Tensor) == (x, 3, 0, size // 2)
            and _args(right, aten.slice.Tensor)[:3] == (x, 3, size // 2)
            and right.meta["val"].shape[-1] == size // 2
            and all(_has_shape(angles, (1, tokens, size)) for angles in (cos, sin))
            and all(angles.meta["val"].dtype == x.meta["val"].dtype for angles in (cos, sin))
            and all(each.meta["val"].stride(-1) == 1 for each in (x, cos, sin))
        )
    except (_Other, ValueError):
        return None
    return Rotation(x, cos, sin) if is_one else None


def _has_shape(node: Node, shape: tuple[Any, ...]) -> bool:
    has = node.meta["val"].shape
    return len(has) == len(shape) and all(
        statically_known_true(a == b) for a, b in zip(has, shape, strict=True)
    )


class _Other(Exception):
    """Something else."""


def _args(node: Any, target: Any, *, alone: bool = True) -> tuple[Any, ...]:
    """Of a call of `target`; `alone`: that has one reader."""
    if not _is_call(node, target) or node.kwargs or (alone and len(node.users) != 1):
        raise _Other
    return tuple(node.args)


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node, with what the compiler must know of its result."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
    return node


def _erase_unused(graph: Graph, node: Node) -> None:
    if node.op == "call_function" and not node.users:
        read = node.all_input_nodes
        graph.erase_node(node)
        for each in read:
            _erase_unused(graph, each)


def _join(graph: Graph, addition: Node) -> None:
    terms: tuple[Any, ...] = addition.args
    for added, term in (terms, terms[::-1]):
        if _is_product(term) and _are_alike(added, term):
            x, weight, _ = term.args
            with graph.inserting_before(addition):
                joined = graph.call_function(torch.ops.penstock.sum_with_product.default, (added, x, weight))
            joined.meta.update(addition.meta)
            addition.replace_all_uses_with(joined)
            graph.erase_node(addition)
            graph.erase_node(term)
            return


def _is_product(term: Any) -> bool:
    """One without a bias, that nobody else reads."""
    is_one = _is_call(term, torch.ops.penstock.product.default)
    return is_one and term.args[2] is None and len(term.users) == 1


def _are_alike(added: Any, term: Node) -> bool:
    """Nothing is stretched or converted by the addition."""
    if not isinstance(added, Node) or added is term:
        return False
    ours, theirs = added.meta["val"], term.meta["val"]
    return ours.dtype == theirs.dtype and _has_shape(term, ours.shape)
