"""Finds a model's blocks from the paths of its parameters and from its scans.

A leaf is what the store holds and a stage reads: a whole parameter, or one slice of a parameter
that a scan over layers reads slice by slice.

A worked example: `embed` of shape (100, 8) and `layers/w` of (2, 8, 8), which a scan takes::

    path           index   shape      block
    embed          ()      (100, 8)   None
    layers/w[0]    (0,)    (8, 8)     ("layers", 0)
    layers/w[1]    (1,)    (8, 8)     ("layers", 1)

For the choice of blocks, the stack's path is `layers/[]/w`: one element for all of its slices.
"""

import dataclasses
from collections.abc import Sequence

import jax

from megatrain_jax._src.common.model_path import ModelPath
from megatrain_jax._src.program.index import Index, numbers, remaining, shown, sliced_axes
from megatrain_jax._src.program.levels import STACK, Parameter, block_keys
from megatrain_jax._src.program.pieces import Pieces, Value, stacked
from megatrain_jax._src.program.stacks import Stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A leaf: one array of the store, a parameter or one slice of it.

    Attributes:
        path: Path of the parameter in the model.
        parameter: Number of the parameter among the model's parameters.
        index: Index of the slice in the parameter; `()` for the whole.
        shape: Shape of the leaf, without the sliced axes.
        dtype: Dtype that the model declares.
        block: Key of the block that the leaf belongs to, or None.
        is_trainable: Whether the leaf gets a gradient.
    """

    path: ModelPath
    parameter: int
    index: Index
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    block: ModelPath | None
    is_trainable: bool = True

    @property
    def name(self) -> str:
        """The path as users write it."""
        return "/".join(map(str, self.path)) + shown(self.index)


def find_leaves(
    paths: Sequence[ModelPath],
    shapes: Sequence[jax.ShapeDtypeStruct],
    stacks: Sequence[Stack],
    upstream: Sequence[int | None],
) -> tuple[Leaf, ...]:
    """Lists the leaves of a model: whole parameters first, then slices layer by layer.

    Args:
        paths: Path of each parameter.
        shapes: Shape and dtype of each parameter, with the sliced axes.
        stacks: Parameters that the loss takes layer by layer.
        upstream: For each parameter, those that run before it as a bit mask (bit i is parameter
            i); None if no equation reads it.
    """
    parameters = [
        Parameter(path=path, shape=tuple(shape.shape), upstream=up)
        for path, shape, up in zip(paths, shapes, upstream, strict=True)
    ]
    known = block_keys(parameters)
    stacked: dict[int, tuple[ModelPath, Stack]] = {}
    for stack in stacks:
        if any(known[i] is not None for i in stack.between - stacked.keys()):
            continue  # slices that are parts of other blocks
        # One path for all of a stack's parameters, so that they are one element of one list.
        prefix = common_prefix([paths[i][:-1] for i in stack.named])
        for i in stack.slices:
            # Stacks of scans come first, so that a parameter in two of them goes with its scan.
            stacked.setdefault(i, (prefix, stack))
    for i, (prefix, stack) in stacked.items():
        inside = paths[i][: len(prefix)] == prefix
        parameters[i] = dataclasses.replace(
            parameters[i],
            path=(*prefix, STACK, *paths[i][len(prefix) if inside else 0 :]),
            shape=remaining(shapes[i].shape, sliced_axes(stack.slices[i][0])),
            count=stack.length,
        )
    # A second choice: stacks are now lists like others, and those not chosen stay whole parameters.
    keys = block_keys(parameters)
    opened = {key[: key.index(STACK)] for key in keys if key and STACK in key}
    sliced = {i: stack for i, (prefix, stack) in sorted(stacked.items()) if prefix in opened}
    leaves = [
        Leaf(path=paths[i], parameter=i, index=(), shape=tuple(shapes[i].shape),
             dtype=shapes[i].dtype, block=keys[i])
        for i in range(len(paths)) if i not in sliced
    ]  # fmt: skip
    # Layer by layer, all parameters of a layer together: whoever walks the leaves walks the blocks
    # in the order in which they run.
    for length in sorted({stack.length for stack in sliced.values()}):
        for k in range(length):
            leaves += [
                Leaf(path=paths[i], parameter=i, index=stack.slices[i][k],
                     shape=parameters[i].shape, dtype=shapes[i].dtype,
                     block=_slice_of(keys[i], stack.layers[k]))
                for i, stack in sliced.items() if stack.length == length
            ]  # fmt: skip
    return tuple(leaves)


def assemble(
    leaves: Sequence[Leaf], values: Sequence[Value], num_parameters: int
) -> list[Value | Pieces]:
    """The model's parameters from the values of its leaves."""
    parts: list[dict[Index, Value]] = [{} for _ in range(num_parameters)]
    for leaf, value in zip(leaves, values, strict=True):
        parts[leaf.parameter][leaf.index] = value
    return [stacked(rows) for rows in parts]


def _slice_of(key: ModelPath | None, layer: Index) -> ModelPath | None:
    """The block of one slice: the path of all of them with the layer's number in its place."""
    if key is None or STACK not in key:
        return key
    at = key.index(STACK)
    return (*key[:at], *numbers(layer), *key[at + 1 :])


def common_prefix(paths: Sequence[ModelPath]) -> ModelPath:
    """The longest path that all paths start with."""
    # Paths between the least and the greatest start with whatever these two have in common.
    first, last = min(paths, key=_sortable), max(paths, key=_sortable)
    n = 0
    while n < min(len(first), len(last)) and first[n] == last[n]:
        n += 1
    return tuple(first[:n])


def _sortable(path):
    return tuple(map(str, path))


def power(sequence: list[int]) -> int:
    """The largest k for which a sequence is some sequence repeated k times: 2 of [1, 2, 1, 2]."""
    n = len(sequence)
    for period in range(1, n + 1):
        if n % period == 0 and sequence[:period] * (n // period) == sequence:
            return n // period
    return 1
