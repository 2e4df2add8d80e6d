"""Chooses the nesting level of lists at which a model is cut into blocks.

A list is a row of indexed siblings (`layers/0`, `layers/1`; `Block_0`, `Block_1`), or an array that
a scan reads slice by slice. The outermost lists are always cut into their elements. An element that
contains lists of layers is cut at these instead if they hold most of its parameters. `block_keys`
has an example.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from megatrain_jax._src.common.model_path import ModelPath

# The matrices of an element: path below the element, and shape.
Matrices = frozenset[tuple[ModelPath, tuple[int, ...]]]
STACK = "[]"  # stands in a path for the number of a slice
_INDEXED = re.compile(r"^(?:(.*)[-._])?(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter, as the choice of blocks sees it: path, size and order of use.

    Attributes:
        path: Path of the parameter; for a stack of layers, `STACK` follows its list's path.
        shape: Shape of the parameter; for a stack, of one slice.
        count: Number of slices; 1 if it is not stacked.
        upstream: Bit mask of the parameters that run before it (bit i is parameter i); None if no
            equation reads it. A stack with slices that run one after another has its own bit.
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
    """The cut of an element at the lists inside it.

    Attributes:
        keys: Block of each parameter in a list of layers, by the parameter's number; parameters not
            listed belong to no block.
        largest: Elements of the largest layer.
    """

    keys: dict[int, ModelPath]
    largest: int


def block_keys(parameters: Sequence[Parameter]) -> list[ModelPath | None]:
    """Chooses the block of each parameter: the path down to the chosen list's index, or None.

    List elements are layers if they are alike, run one after another and have several matrices
    each; two such elements are enough. Elements with a single matrix are layers if at least three
    are alike and outnumber the elements like the one that encloses them. An element is opened if
    the layers inside it hold three quarters of it; arrays larger than a layer, such as an
    embedding, don't count. Its parameters outside the lists of layers belong to no block.

    Example: a ConvNeXt has four stages that run one after another; `stages_2` has nine layers

        stages_2/downsample/kernel                 (2, 2, 192, 384)
        stages_2/layers_0/{dwconv, up, down}/...   (7, 7, 384), (384, 1536), (1536, 384)
        ...
        stages_2/layers_8/...

    The layers are alike, have several matrices, each reads the result of the one before, and they
    hold 97% of the stage. So the blocks are `stages_2/layers_0` to `stages_2/layers_8`, and the
    downsampling is in none. With `layers_0/mlp_0`, `layers_0/mlp_1` (two matrices of different
    shapes) or `layers_0/experts_0` ... `layers_0/experts_7` (none reads a result of another), the
    block would stay `layers_0`.
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
    """The lists of a model, with tests whether their elements are alike, in series, or layers."""

    def __init__(self, parameters: Sequence[Parameter]):
        """Finds the indexed siblings among parameters."""
        self.parameters = parameters
        siblings = _siblings(parameters)
        for (above, stem), elements in siblings.items():
            if stem and (first := self._unnumbered((*above, stem), elements)):
                elements.add(first)
        # An index without siblings makes no list: `Dense_0` is just a layer's name.
        self.list_of = {
            element: place
            for place, elements in siblings.items()
            if len(elements) > 1
            for element in elements
        }

    def below(self, members: Iterable[int], depth: int) -> list[dict[ModelPath, list[int]]]:
        """The outermost lists below a depth of the paths: for each, its elements' parameters."""
        rows: dict[tuple, dict[ModelPath, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i in members:
            path = self.parameters[i].path
            for d in range(depth, len(path)):
                element = path[: d + 1]
                place = (path[:d], None) if path[d] == STACK else self.list_of.get(element)
                if place is not None:
                    rows[place][element].append(i)
                    break
        return list(rows.values())

    def kinds(self, row: dict[ModelPath, list[int]]) -> list[tuple[list[ModelPath], int]]:
        """The elements of a list, grouped by likeness, with each group's size (slices if stacked).

        An element joins a group if it is like any member: likeness is not transitive.
        """
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
        """The cut of an element into layers; None if it should stay whole.

        Args:
            element: Path of the element.
            members: Its parameters.
            likes: Number of elements of its list that are like it, itself included.
        """
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
            # A list is cut as a whole: if it has layers of one kind, all its elements are blocks.
            if any_layers:
                keys.update(found)
        # Layers must hold three quarters of the parameters that are no larger than they are. A
        # larger embedding beside them is no reason against the cut.
        held = {i for rows in layers.values() for i in rows}
        sizes = {i: self.parameters[i].size * self.parameters[i].count for i in members}
        beside = sum(n for i, n in sizes.items() if i not in held and n <= largest)
        good = held and sum(sizes[i] for i in held) >= 3 * beside
        return _Opened(keys=keys, largest=largest) if good else None

    def repeats(self, kind: list[ModelPath], row, count: int, likes: int) -> bool:
        """Whether like elements are numerous enough to be layers of an element with `likes` likes.

        With several matrices each, two are enough; with one, more than two and more than `likes`.
        """
        matrices = min(len(self._matrices(row[element], len(element))) for element in kind)
        return count > 1 if matrices > 1 else matrices == 1 and count > max(2, likes)

    def in_series(self, elements: Sequence[Sequence[int]]) -> bool:
        """Whether elements run one after another, in either order: layers do, experts don't.

        Elements that no equation reads are ignored.
        """
        before = [[self.parameters[i].upstream for i in members] for members in elements]
        masks = [sum(1 << i for i in members) for members in elements]
        read = [k for k, ups in enumerate(before) if any(up is not None for up in ups)]

        def follows(b: int, a: int) -> bool:
            return any(up is not None and up & masks[a] for up in before[b])

        if len(elements) == 1:  # a stack: if it is upstream of itself, its slices run in series
            return any(
                up is not None and up >> i & 1 for i, up in zip(elements[0], before[0], strict=True)
            )
        # A list may be traversed backwards: paths don't tell the order of calls.
        pairs = list(zip(read, read[1:], strict=False))
        return bool(pairs) and all(follows(b, a) or follows(a, b) for a, b in pairs)

    def _unnumbered(self, first: ModelPath, elements: set[ModelPath]) -> ModelPath | None:
        """The first element of a list that numbers only later ones, as Keras does; None if none.

        `block` is the first of `block_1`, `block_2`, if it is like one of them. Beside a single
        numbered element, both must have the same matrices, and several.
        """
        numbers = [number for path in elements if (number := _index(path[-1]))]
        if min(number for _, number in numbers) not in (1, 2):
            return None
        found: dict[ModelPath, list[int]] = {path: [] for path in (first, *elements)}
        for i, parameter in enumerate(self.parameters):
            if (path := parameter.path[: len(first)]) in found:
                found[path].append(i)
        if not found[first]:
            return None
        matrices = {path: self._matrices(rows, len(path)) for path, rows in found.items()}
        own = matrices.pop(first)
        if len(elements) > 1:
            is_like = any(_alike(own, other) for other in matrices.values())
        else:
            is_like = len(own) > 1 and own in matrices.values()
        return first if is_like else None

    def _matrices(self, members: Sequence[int], depth: int) -> Matrices:
        """An element's arrays with two axes or more, by name and shape, without very small ones."""
        own = [self.parameters[i] for i in members]
        # Gates and biases with two axes would make unlike layers look alike.
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
    """The elements of each list of indexed siblings, by the path above it and their stem.

    The stem of `Block_3` is `Block`, an integer's is empty. An element with all its parameters in
    one stack (`group_0/[]/w`) is left out: its list is the stack.
    """
    stacks: dict[ModelPath, set[ModelPath | None]] = defaultdict(set)
    for path in (p.path for p in parameters):
        for depth, component in enumerate(path):
            if _index(component) is not None:
                below = [d for d in range(depth + 1, len(path)) if path[d] == STACK]
                stacks[path[: depth + 1]].add(path[: below[0]] if below else None)
    siblings: dict[tuple, set[ModelPath]] = defaultdict(set)
    for element, found in stacks.items():
        if None in found or len(found) > 1:
            found = _index(element[-1])
            siblings[element[:-1], found and found[0]].add(element)
    return siblings


def _alike(one: Matrices, other: Matrices) -> bool:
    """Whether the common matrices, by path and shape, are at least a third of the larger set."""
    return bool(one) and 3 * len(one & other) >= max(len(one), len(other))


def _index(component: str | int) -> tuple[str, int] | None:
    """Stem and number of a component: ("Block", 3) for `Block_3`; None if it has no number.

    A hyphen or a dot may replace the underscore. Without a separator, `norm1` is a name.
    """
    if isinstance(component, int):
        return "", component
    match = _INDEXED.match(component)
    return (match[1] or "", int(match[2])) if match else None
