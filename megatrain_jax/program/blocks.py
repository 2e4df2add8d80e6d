"""Finds a model's blocks from the paths of its parameters and from its scans.

A leaf is what the store holds and a stage reads: a whole parameter, or one slice of a parameter
that a scan over layers reads slice by slice.
"""

import dataclasses
from collections.abc import Sequence

import jax

from megatrain_jax.program.inline import ScannedLeaves
from megatrain_jax.program.levels import STACK, Parameter, Path, block_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the store.

    Attributes:
        path: Path of the parameter in the model.
        parameter: Index of the parameter among the model's parameters.
        index: Which slice along axis 0, or None for the whole parameter.
        shape: Shape of this array, without the stacked axis.
        dtype: Dtype that the model declares.
        block: Key of the block it belongs to, or None.
        trainable: Whether it gets a gradient.
    """

    path: Path
    parameter: int
    index: int | None
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    block: Path | None
    trainable: bool = True

    @property
    def name(self) -> str:
        """The path as users write it."""
        name = "/".join(map(str, self.path))
        return name if self.index is None else f"{name}[{self.index}]"


def find_leaves(
    paths: Sequence[Path],
    shapes: Sequence[jax.ShapeDtypeStruct],
    scans: Sequence[ScannedLeaves],
    upstream: Sequence[int | None],
) -> tuple[Leaf, ...]:
    """Lists the leaves of a model: whole parameters first, then slices layer by layer.

    Args:
        paths: Path of each parameter.
        shapes: Its shape, with the stacked axis.
        scans: Which parameters scans read slice by slice.
        upstream: For each parameter those that run before it, as the bits of a number.
    """
    stacked: dict[int, tuple[Path, int]] = {}
    for scan in scans:
        prefix = common_prefix([paths[i][:-1] for i in scan.leaves])
        for i in scan.leaves:
            stacked.setdefault(i, (prefix, scan.length))
    parameters = []
    for i, path in enumerate(paths):
        shape, count = tuple(shapes[i].shape), 1
        if i in stacked:
            prefix, count = stacked[i]
            path, shape = (*prefix, STACK, *path[len(prefix) :]), shape[1:]
        parameters.append(Parameter(path=path, shape=shape, count=count, upstream=upstream[i]))
    keys = block_keys(parameters)
    opened = {key[: key.index(STACK)] for key in keys if key and STACK in key}
    sliced = {i: n for i, (prefix, n) in stacked.items() if prefix in opened}
    leaves = [
        Leaf(path=paths[i], parameter=i, index=None, shape=tuple(shapes[i].shape),
             dtype=shapes[i].dtype, block=keys[i])
        for i in range(len(paths)) if i not in sliced
    ]  # fmt: skip
    for length in sorted(set(sliced.values())):
        for k in range(length):
            leaves += [
                Leaf(path=paths[i], parameter=i, index=k, shape=parameters[i].shape,
                     dtype=shapes[i].dtype, block=_slice_of(keys[i], k))
                for i, n in sorted(sliced.items()) if n == length
            ]  # fmt: skip
    return tuple(leaves)


def _slice_of(key: Path | None, k: int) -> Path | None:
    return key and tuple(k if component == STACK else component for component in key)


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
