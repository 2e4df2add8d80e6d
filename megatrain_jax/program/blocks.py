"""Finds a model's blocks from the paths of its parameters and from its scans.

A leaf is what the store holds and a stage reads: a whole parameter, or one slice of a parameter
that a scan over layers reads slice by slice.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence

import jax

from megatrain_jax.program.index import Index, numbers, remaining, shown, sliced_axes
from megatrain_jax.program.stacks import Stack

Path = tuple[str | int, ...]
_INDEXED = re.compile(r"^(?:(.*)_)?(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the store.

    Attributes:
        path: Path of the parameter in the model.
        parameter: Index of the parameter among the model's parameters.
        index: Which slice of the parameter it is; `()` for the whole.
        shape: Shape of this array, without the sliced axes.
        dtype: Dtype that the model declares.
        block: Key of the block it belongs to, or None.
        trainable: Whether it gets a gradient.
    """

    path: Path
    parameter: int
    index: Index
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    block: Path | None
    trainable: bool = True

    @property
    def name(self) -> str:
        """The path as users write it."""
        return "/".join(map(str, self.path)) + shown(self.index)


def find_leaves(
    paths: Sequence[Path],
    shapes: Sequence[jax.ShapeDtypeStruct],
    stacks: Sequence[Stack],
) -> tuple[Leaf, ...]:
    """Lists the leaves of a model: parameters outside stacks first, then slices layer by layer."""
    keys = block_keys(paths)
    stacked: dict[int, tuple[Path, Stack]] = {}
    for stack in stacks:
        members = set(stack.named)
        owners = {keys[i] for i in members}
        owned = {i for i, key in keys.items() if key in owners}
        if len(owners) == 1 and None not in owners and not owned <= members:
            continue  # a loop that is only a part of one block stays inside its stage
        if any(keys[i] is not None for i in stack.between - stacked.keys()):
            continue  # slices that are parts of other blocks
        prefix = common_prefix([paths[i][:-1] for i in stack.named])
        for i in stack.slices:
            stacked.setdefault(i, (prefix, stack))
    rest = [i for i in range(len(paths)) if i not in stacked]
    # Without the stacked parameters, what looked like a row of siblings may be none.
    keys.update(zip(rest, block_keys([paths[i] for i in rest]).values(), strict=True))
    leaves = [
        Leaf(path=paths[i], parameter=i, index=(), shape=tuple(shapes[i].shape),
             dtype=shapes[i].dtype, block=keys[i])
        for i in rest
    ]  # fmt: skip
    members = sorted(stacked.items(), key=lambda item: item[0])
    for length in sorted({stack.length for _, stack in stacked.values()}):
        for k in range(length):
            for i, (prefix, stack) in members:
                if stack.length == length:
                    index = stack.slices[i][k]
                    shape = remaining(shapes[i].shape, sliced_axes(index))
                    leaves.append(
                        Leaf(path=paths[i], parameter=i, index=index, shape=shape,
                             dtype=shapes[i].dtype, block=(*prefix, *numbers(stack.layers[k])))
                    )  # fmt: skip
    return tuple(leaves)


def block_keys(paths: Sequence[Path]) -> dict[int, Path | None]:
    """The block of each path: everything under its first component that has indexed siblings."""
    siblings: dict[tuple[Path, str], set[int]] = defaultdict(set)
    for path in paths:
        for depth, component in enumerate(path):
            if (found := _index(component)) is not None:
                siblings[path[:depth], found[0]].add(found[1])

    def key(path: Path) -> Path | None:
        for depth, component in enumerate(path):
            found = _index(component)
            if found is not None and len(siblings[path[:depth], found[0]]) > 1:
                return path[: depth + 1]
        return None

    return {i: key(path) for i, path in enumerate(paths)}


def _index(component: str | int) -> tuple[str, int] | None:
    if isinstance(component, int):
        return "", component
    match = _INDEXED.match(component)
    return (match[1] or "", int(match[2])) if match else None


def common_prefix(paths: Sequence[Path]) -> Path:
    """The longest path that all paths start with."""
    first, last = min(paths, key=_sortable), max(paths, key=_sortable)
    n = 0
    while n < min(len(first), len(last)) and first[n] == last[n]:
        n += 1
    return tuple(first[:n])


def _sortable(path):
    return tuple(map(str, path))


def power(sequence: list[int]) -> int:
    """The largest k for which a sequence is some sequence repeated k times."""
    n = len(sequence)
    for period in range(1, n + 1):
        if n % period == 0 and sequence[:period] * (n // period) == sequence:
            return n // period
    return 1
