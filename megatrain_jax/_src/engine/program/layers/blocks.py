"""Assigns a model's parameters to blocks, from their paths and from scans over layers.

A leaf is one array in the store and one input of a stage: a whole parameter, or one slice of a
parameter that the loss reads layer by layer.

Example: `embed` of shape (100, 8) and `layers/w` of shape (2, 8, 8), scanned over axis 0::

    path           index   shape      block
    embed          ()      (100, 8)   None
    layers/w[0]    (0,)    (8, 8)     ("layers", 0)
    layers/w[1]    (1,)    (8, 8)     ("layers", 1)

While blocks are chosen, the stack's path is `layers/[]/w`: one list element for all its slices.
"""

import dataclasses
from collections.abc import Sequence

import jax

from megatrain_jax._src.common.model_path import ModelPath, module_path
from megatrain_jax._src.engine.program.layers.index import (
    Index,
    numbers,
    remaining,
    shown,
    sliced_axes,
)
from megatrain_jax._src.engine.program.layers.levels import STACK, Parameter, block_keys
from megatrain_jax._src.engine.program.layers.sliced_values import SlicedValue, Value, stacked
from megatrain_jax._src.engine.program.layers.stacks import Stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A leaf: one array of the store, either a parameter or one slice of it.

    Attributes:
        path: Path of the parameter in the model.
        parameter: Number of the parameter among the model's parameters.
        index: Index of the slice in the parameter; `()` for the whole.
        shape: Shape of the leaf, without the sliced axes.
        dtype: Dtype that the model declares.
        block: Key of the leaf's block, or None.
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

    @property
    def modules(self) -> ModelPath:
        """The path with one component for each module, also if a key of the model is a path."""
        return module_path(self.path)


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
        stacks: Parameters that the loss reads layer by layer.
        upstream: For each parameter, a bit mask of the parameters that run before it (bit i is
            parameter i); None if no equation reads it.
    """
    given, paths = paths, [*map(module_path, paths)]
    parameters = [
        Parameter(path=path, shape=tuple(shape.shape), upstream=up)
        for path, shape, up in zip(paths, shapes, upstream, strict=True)
    ]
    known = block_keys(parameters)
    stacked: dict[int, tuple[ModelPath, Stack]] = {}
    for stack in stacks:
        if any(known[i] is not None for i in stack.between - stacked.keys()):
            continue  # these slices are parts of blocks already
        # All parameters of a stack get one path prefix, so that they form one element of one list.
        prefix = common_prefix([paths[i][:-1] for i in stack.named])
        for i in stack.slices:
            # Stacks of scans come first, so a parameter in two stacks belongs to its scan.
            stacked.setdefault(i, (prefix, stack))
    for i, (prefix, stack) in stacked.items():
        inside = paths[i][: len(prefix)] == prefix
        parameters[i] = dataclasses.replace(
            parameters[i],
            path=(*prefix, STACK, *paths[i][len(prefix) if inside else 0 :]),
            shape=remaining(shapes[i].shape, sliced_axes(stack.slices[i][0])),
            count=stack.length,
        )
    # The second choice treats stacks as ordinary lists; stacks not chosen stay whole parameters.
    keys = block_keys(parameters)
    opened = {key[: key.index(STACK)] for key in keys if key and STACK in key}
    sliced = {i: stack for i, (prefix, stack) in sorted(stacked.items()) if prefix in opened}
    leaves = [
        Leaf(path=given[i], parameter=i, index=(), shape=tuple(shapes[i].shape),
             dtype=shapes[i].dtype, block=keys[i])
        for i in range(len(paths)) if i not in sliced
    ]  # fmt: skip
    # Layer by layer, with all parameters of a layer together, so leaves list the blocks in the
    # order in which they run.
    for length in sorted({stack.length for stack in sliced.values()}):
        for k in range(length):
            leaves += [
                Leaf(path=given[i], parameter=i, index=stack.slices[i][k],
                     shape=parameters[i].shape, dtype=shapes[i].dtype,
                     block=_slice_of(keys[i], stack.layers[k]))
                for i, stack in sliced.items() if stack.length == length
            ]  # fmt: skip
    return tuple(leaves)


def assemble(
    leaves: Sequence[Leaf], values: Sequence[Value], num_parameters: int
) -> list[Value | SlicedValue]:
    """The model's parameters, put together from the values of its leaves."""
    parts: list[dict[Index, Value]] = [{} for _ in range(num_parameters)]
    for leaf, value in zip(leaves, values, strict=True):
        parts[leaf.parameter][leaf.index] = value
    return [stacked(rows) for rows in parts]


def _slice_of(key: ModelPath | None, layer: Index) -> ModelPath | None:
    """The block of one slice: the stack's key with the layer's number in place of `[]`."""
    if key is None or STACK not in key:
        return key
    at = key.index(STACK)
    return (*key[:at], *numbers(layer), *key[at + 1 :])


def common_prefix(paths: Sequence[ModelPath]) -> ModelPath:
    """The longest path that all paths start with."""
    # All paths sort between the smallest and the largest, so their common prefix is everyone's.
    first, last = min(paths, key=_sortable), max(paths, key=_sortable)
    n = 0
    while n < min(len(first), len(last)) and first[n] == last[n]:
        n += 1
    return tuple(first[:n])


def _sortable(path):
    return tuple(map(str, path))


def power(sequence: list[int]) -> int:
    """The largest k such that a sequence is another one repeated k times: 2 for [1, 2, 1, 2]."""
    n = len(sequence)
    for period in range(1, n + 1):
        if n % period == 0 and sequence[:period] * (n // period) == sequence:
            return n // period
    return 1
