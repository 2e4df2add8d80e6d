"""Chooses the level of nested lists at which a model is cut into blocks.

A list is what has indexed siblings (`layers/0`, `layers/1`; `Block_0`, `Block_1`) or what a scan
reads slice by slice. The lists nearest to the root are always cut into their elements. An element
that has lists inside is opened, and cut at those, if they are lists of layers that hold most of it.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from megatrain_jax._src.common.model_path import ModelPath

Matrices = frozenset[tuple[ModelPath, tuple[int, ...]]]
STACK = "[]"  # stands in a path where a slice's number will
_INDEXED = re.compile(r"^(?:(.*)_)?(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """What is known of a parameter.

    Attributes:
        path: Its path; with `STACK` after its list's path if a scan reads it slice by slice.
        shape: Its shape, that of a slice if it is stacked.
        count: The number of slices, or 1.
        upstream: The parameters that run before it, as the bits of a number; None if none reads it.
    """

    path: ModelPath
    shape: tuple[int, ...]
    count: int = 1
    upstream: int | None = None

    @property
    def size(self) -> int:
        """Elements of one slice."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Opened:
    """What an element is cut into: the block of each of its parameters, and its largest layer."""

    keys: dict[int, ModelPath]
    largest: int


def block_keys(parameters: Sequence[Parameter]) -> list[ModelPath | None]:
    """The block of each parameter, or None: the path down to the chosen list's index.

    Elements are layers if they are alike, run one after another, and have several matrices each:
    two are enough. Those of a single matrix are layers if at least three are alike and they are
    more than their surrounding element has likes. An element is opened if layers inside it hold
    three quarters of it; arrays that are larger than a layer, as an embedding, don't count. What
    it has beside its lists of layers belongs to no block.

    Example: a ConvNeXt has four stages that run one after another, `stages_2` nine layers

        stages_2/downsample/kernel                 (2, 2, 192, 384)
        stages_2/layers_0/{dwconv, up, down}/...   (7, 7, 384), (384, 1536), (1536, 384)
        ...
        stages_2/layers_8/...

    The layers are alike, have several matrices, each reads what the one before it made, and they
    hold 97% of the stage: the blocks are `stages_2/layers_0` to `stages_2/layers_8`, and the
    downsampling is in none. In `layers_0/mlp_0`, `layers_0/mlp_1`, two matrices of other shapes,
    or in `layers_0/experts_0` ... `layers_0/experts_7`, none of which reads what another made,
    the block would stay `layers_0`.
    """
    lists = Lists(parameters)
    keys: list[ModelPath | None] = [None] * len(parameters)
    for row in lists.below(range(len(parameters)), 0):
        for kind, count in lists.kinds(row):
            for element in kind:
                opened = lists.opened(element, row[element], count)
                found = opened.keys if opened else dict.fromkeys(row[element], element)
                for i, key in found.items():
                    keys[i] = key
    return keys


class Lists:
    """The lists of a model: which elements they have, and what these are like."""

    def __init__(self, parameters: Sequence[Parameter]):
        """Finds the indexed siblings among parameters."""
        self.parameters = parameters
        self.siblings = _siblings(parameters)

    def below(self, members: Iterable[int], depth: int) -> list[dict[ModelPath, list[int]]]:
        """The first lists below a depth: for each element its parameters."""
        rows: dict[tuple, dict[ModelPath, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i in members:
            path = self.parameters[i].path
            for d in range(depth, len(path)):
                if path[d] == STACK or len(self.siblings.get(_list_of(path, d), ())) > 1:
                    if path[d] == STACK or path[: d + 1] in self.siblings[_list_of(path, d)]:
                        rows[_list_of(path, d)][path[: d + 1]].append(i)
                        break
        return list(rows.values())

    def kinds(self, row: dict[ModelPath, list[int]]) -> list[tuple[list[ModelPath], int]]:
        """The elements of a list, like with like, with their number."""
        kinds: list[tuple[list[ModelPath], set[Matrices]]] = []
        for element, members in row.items():
            matrices = self._matrices(members, len(element))
            for kind, known in kinds:
                if any(_alike(matrices, other) for other in known):
                    kind.append(element)
                    known.add(matrices)
                    break
            else:
                kinds.append(([element], {matrices}))
        return [(kind, self._number(kind, row)) for kind, _ in kinds]

    def opened(self, element: ModelPath, members: Sequence[int], likes: int) -> _Opened | None:
        """The layers of an element with so many likes, or None if it is better left whole."""
        keys: dict[int, ModelPath] = {}
        layers: dict[ModelPath, list[int]] = {}
        largest = 0
        for row in self.below(members, len(element)):
            found: dict[int, ModelPath] = {}
            any_layers = False
            for kind, count in self.kinds(row):
                inside = [row[inner] for inner in kind]
                are_layers = self.repeats(kind, row, count, likes) and self.in_series(inside)
                for inner in kind:
                    cut = self.opened(inner, row[inner], count)
                    found.update(cut.keys if cut else dict.fromkeys(row[inner], inner))
                    if cut or are_layers:
                        any_layers = True
                        layers[inner] = row[inner]
                        largest = max(largest, cut.largest if cut else self._size(row[inner]))
            if any_layers:
                keys.update(found)
        held = {i for rows in layers.values() for i in rows}
        sizes = {i: self.parameters[i].size * self.parameters[i].count for i in members}
        beside = sum(n for i, n in sizes.items() if i not in held and n <= largest)
        good = held and sum(sizes[i] for i in held) >= 3 * beside
        return _Opened(keys=keys, largest=largest) if good else None

    def repeats(self, kind: list[ModelPath], row, count: int, likes: int) -> bool:
        """Whether like elements are enough to be layers of an element with so many likes."""
        matrices = min(len(self._matrices(row[element], len(element))) for element in kind)
        return count > 1 if matrices > 1 else matrices == 1 and count > max(2, likes)

    def in_series(self, elements: Sequence[Sequence[int]]) -> bool:
        """Whether each element reads what the one before it made, or each what its next one did."""
        before = [[self.parameters[i].upstream for i in members] for members in elements]
        masks = [sum(1 << i for i in members) for members in elements]
        read = [k for k, ups in enumerate(before) if any(up is not None for up in ups)]

        def follows(b: int, a: int) -> bool:
            return any(up is not None and up & masks[a] for up in before[b])

        if len(elements) == 1:  # a stack: a slice that meets the one before it runs after it
            return any(
                up is not None and up >> i & 1 for i, up in zip(elements[0], before[0], strict=True)
            )
        pairs = list(zip(read, read[1:], strict=False))
        return bool(pairs) and all(follows(b, a) or follows(a, b) for a, b in pairs)

    def _matrices(self, members: Sequence[int], depth: int) -> Matrices:
        """An element's arrays of two axes or more, by name and shape, without very small ones."""
        own = [self.parameters[i] for i in members]
        least = max(p.size for p in own) / 16
        return frozenset(
            (p.path[depth:], p.shape)
            for p in own
            if sum(n > 1 for n in p.shape) > 1 and p.size >= least
        )

    def _number(self, kind: list[ModelPath], row) -> int:
        slices = row[kind[0]] if kind[0][-1] == STACK else ()
        return max((self.parameters[i].count for i in slices), default=len(kind))

    def _size(self, members: Sequence[int]) -> int:
        return sum(self.parameters[i].size for i in members)


def _siblings(parameters: Sequence[Parameter]) -> dict[tuple, set[ModelPath]]:
    """The elements of each list, but for those that are nothing but one stack."""
    stacks: dict[ModelPath, set[ModelPath | None]] = defaultdict(set)
    for path in (p.path for p in parameters):
        for depth, component in enumerate(path):
            if _index(component) is not None:
                below = [d for d in range(depth + 1, len(path)) if path[d] == STACK]
                stacks[path[: depth + 1]].add(path[: below[0]] if below else None)
    siblings: dict[tuple, set[ModelPath]] = defaultdict(set)
    for element, found in stacks.items():
        if None in found or len(found) > 1:
            siblings[_list_of(element, len(element) - 1)].add(element)
    return siblings


def _list_of(path: ModelPath, depth: int) -> tuple:
    """Which list a path's component is an index of: where it stands, and its stem."""
    found = _index(path[depth])
    return path[:depth], found[0] if found else None


def _alike(one: Matrices, other: Matrices) -> bool:
    """Whether a third of either's matrices are the same in name and shape."""
    return bool(one) and 3 * len(one & other) >= max(len(one), len(other))


def _index(component: str | int) -> tuple[str, int] | None:
    if isinstance(component, int):
        return "", component
    match = _INDEXED.match(component)
    return (match[1] or "", int(match[2])) if match else None


def is_indexed(component: str | int) -> bool:
    """Whether a component of a path is an index, or ends in one as `Block_3` does."""
    return _index(component) is not None
