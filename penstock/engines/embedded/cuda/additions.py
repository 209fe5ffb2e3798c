"""A pass over compiled layers: what is only multiplied to be added to something is added by the product.

A layer of a transformer does so twice, at the end of attention and at the end of its MLP.
"""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true

from penstock.engines.embedded.cuda import products


class JoinAdditions(CustomGraphPass):
    """Turns `a + product(x, weight)` into `sum_with_product(a, x, weight)`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            if node.kwargs.get("alpha", 1) == 1:
                _join(graph, node)

    def uuid(self) -> Any:
        """Compiled code is kept by this."""
        return get_hash_for_files((__file__, str(products.__file__)))


def _join(graph: torch.fx.Graph, addition: torch.fx.Node) -> None:
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
    return (
        isinstance(term, torch.fx.Node)
        and term.target is torch.ops.penstock.product.default
        and term.args[2] is None
        and len(term.users) == 1
    )


def _are_alike(added: Any, term: torch.fx.Node) -> bool:
    """Nothing is stretched or converted by the addition."""
    if not isinstance(added, torch.fx.Node) or added is term:
        return False
    ours, theirs = added.meta["val"], term.meta["val"]
    return (
        ours.dtype == theirs.dtype
        and ours.dim() == theirs.dim()
        and all(statically_known_true(a == b) for a, b in zip(ours.shape, theirs.shape, strict=True))
    )
