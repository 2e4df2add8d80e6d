"""The kernels of a GPU's function, and their order.

Equations that write arrays are nodes. They run in the order of the equations, with exceptions:
nodes that depend only on arguments run when they are needed, nodes without new arrays as early as
possible, and products that no product needs last.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from megatrain_jax._src.engine.kernels.flat_equations import Equation


class Node(NamedTuple):
    """An equation that writes arrays.

    Attributes:
        eqn: The equation.
        reads: The arrays that it reads, also through fused values.
        waits: The nodes that it has to follow.
        makes: The arrays that it allocates.
        arguments_only: Whether it depends only on arguments.
        multiplies: Whether it computes a matrix product, at least of a sum.
    """

    eqn: Equation
    reads: frozenset[Any]
    waits: frozenset[int]
    makes: Sequence[Any]
    arguments_only: bool
    multiplies: bool


def in_order(nodes: Sequence[Node], held: Any) -> list[int]:
    """The numbers of nodes in the order of their execution.

    Args:
        nodes: The nodes, in the order of their equations.
        held: Function from arrays to the bytes that they allocate.
    """
    followers: dict[int, list[int]] = {}
    missing = [len(node.waits) for node in nodes]
    for number, node in enumerate(nodes):
        for before in node.waits:
            followers.setdefault(before, []).append(number)
    # A kernel that decodes several weights at once makes all of them.
    together: dict[Any, list[int]] = {}
    for number, node in enumerate(nodes):
        if node.arguments_only and len(node.reads) > 1:
            like = node.reads, held(node.makes)
            together.setdefault(like, []).append(number)
    order: dict[int, None] = {}

    def run(number: int) -> None:
        todo = [number]
        while todo:
            number = todo.pop()
            if number in order:
                continue
            node = nodes[number]
            if lacking := [before for before in node.waits if before not in order]:
                todo += [number, *sorted(lacking, reverse=True)]
                continue
            order[number] = None
            if node.arguments_only:
                todo += together.get((node.reads, held(node.makes)), ())
            for other in followers.get(number, ()):
                missing[other] -= 1
                # A node without new arrays runs at once, because it may free memory.
                is_free = not nodes[other].multiplies and not held(nodes[other].makes)
                if not missing[other] and is_free:
                    todo.append(other)

    readers: dict[Any, list[int]] = {}
    for number, node in enumerate(nodes):
        for array in node.reads if node.multiplies else ():
            readers.setdefault(array, []).append(number)
    firm = sorted(
        (number for number, node in enumerate(nodes) if not node.arguments_only),
        key=_last(nodes).__contains__,
    )
    for number, following in zip_longest(firm, firm[1:]):
        # A weight may be cut out before the product's last operand is computed.
        if following is not None and number in nodes[following].waits:
            for before in sorted(nodes[following].waits):
                if nodes[before].arguments_only:
                    run(before)
        for smaller in sorted(_smaller(nodes, number, held, order, readers)):
            run(smaller)
        run(number)
    for number in range(len(nodes)):  # results that depend only on arguments
        run(number)
    return list(order)


def _last(nodes: Sequence[Node]) -> set[int]:
    """The nodes that run last: products that no product needs, and their followers."""
    needed: set[int] = set()  # by a product
    for number in reversed(range(len(nodes))):
        if nodes[number].multiplies or number in needed:
            needed.update(nodes[number].waits)
    found: set[int] = set()
    for number, node in enumerate(nodes):
        is_last = node.multiplies and number not in needed
        if is_last or not found.isdisjoint(node.waits):
            found.add(number)
    return found


def _smaller(nodes, number, held, order, readers):
    """Products that share an operand with a product, could run before it, and need less memory."""
    node = nodes[number]
    if not node.multiplies or number in order:
        return []
    found = {n for array in node.reads for n in readers[array] if n > number and n not in order}
    return [
        n
        for n in found
        if 0 < held(nodes[n].makes) < held(node.makes)
        and all(before in order or nodes[before].arguments_only for before in nodes[n].waits)
    ]
