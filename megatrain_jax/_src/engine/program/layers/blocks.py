"""Assigns a model's parameters to blocks, from their paths and from scans over layers.

A leaf is one array in the store and one input of a stage: a whole parameter, or one slice of a
parameter that the loss reads layer by layer.

Example: `embed` of shape (100, 8) and `layers/w` of shape (2, 8, 8), scanned over axis 0::

    path           index   shape      block
    embed          ()      (100, 8)   None
    layers/w[0]    (0,)    (8, 8)     ("layers", 0)
    layers/w[1]    (1,)    (8, 8)     ("layers", 1)

While blocks are chosen, the stack's path is `layers/[]/w`: one list element for all its slices.

`block_keys` chooses the nesting level of lists at which a model is cut into blocks.

A list is a row of indexed siblings (`layers/0`, `layers/1`; `Block_0`, `Block_1`), or an array that
a scan reads slice by slice. The outermost lists are always cut into their elements. An element that
contains lists of layers is cut at these instead if they hold most of its parameters. `block_keys`
has an example.

`find_upstream` finds, from the trace of a loss, the parameters upstream of each parameter.

Parameter i is upstream of j if j is combined with a value that depends on i and on data. List
elements that run in series are each upstream of the next: this distinguishes layers from experts,
which run side by side.
"""

import dataclasses
import functools
import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from megatrain_jax._src.common.trees import ModelPath, module_path
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import (
    Index,
    SlicedValue,
    Value,
    numbers,
    remaining,
    shown,
    sliced_axes,
    stacked,
)
from megatrain_jax._src.engine.program.layers.stacks import Stack

# The matrices of an element: path below the element, and shape.
Matrices = frozenset[tuple[ModelPath, tuple[int, ...]]]
STACK = "[]"  # stands in a path for the number of a slice
_INDEXED = re.compile(r"^(?:(.*)[-._])?(\d+)$")
_INDEXED_PREFIX = re.compile(r"^((?:.*?[-_])?)(\d+)[-_](.+)$")


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


# The cut of an element at the lists inside it: the block of each parameter in a list of layers, by
# number, while the remaining parameters belong to no block; and the elements of the largest layer.
_Opened = tuple[dict[int, ModelPath], int]


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
                found = opened[0] if opened else dict.fromkeys(row[element], element)
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
        lists = [(place, elements) for place, elements in siblings.items() if len(elements) > 1]
        self.list_of = {element: place for place, elements in lists for element in elements}

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
                    found.update(cut[0] if cut else dict.fromkeys(row[inner], inner))
                    if cut or are_layers:
                        any_layers = True
                        layers[inner] = row[inner]
                        size = sum(self.parameters[i].size for i in row[inner])
                        largest = max(largest, cut[1] if cut else size)
            # A list is cut as a whole: if it has layers of one kind, all its elements are blocks.
            if any_layers:
                keys.update(found)
        # Layers must hold three quarters of the parameters that are no larger than they are. A
        # larger embedding beside them is no reason against the cut.
        held = {i for rows in layers.values() for i in rows}
        sizes = {i: self.parameters[i].size * self.parameters[i].count for i in members}
        beside = sum(n for i, n in sizes.items() if i not in held and n <= largest)
        good = held and sum(sizes[i] for i in held) >= 3 * beside
        return (keys, largest) if good else None

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
            ups = zip(elements[0], before[0], strict=True)
            return any(up is not None and up >> i & 1 for i, up in ups)
        # A list may be traversed backwards: paths don't tell the order of calls.
        pairs = itertools.pairwise(read)
        return len(read) > 1 and all(follows(b, a) or follows(a, b) for a, b in pairs)

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
        is_like = len(own) > 1 and own in matrices.values()
        if len(elements) > 1:
            is_like = any(_alike(own, other) for other in matrices.values())
        return first if is_like else None

    def _matrices(self, members: Sequence[int], depth: int) -> Matrices:
        """An element's arrays with two axes or more, by name and shape, without very small ones."""
        own = [self.parameters[i] for i in members]
        # Gates and biases with two axes would make unlike layers look alike.
        least = max(p.size for p in own) / 16
        found = [p for p in own if _is_matrix(p.shape) and p.size >= least]
        return frozenset((p.path[depth:], p.shape) for p in found)

    def _number(self, kind: list[ModelPath], row) -> int:
        slices = row[kind[0]] if kind[0][-1] == STACK else ()
        return max((self.parameters[i].count for i in slices), default=len(kind))


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


def _split_after_numbers(
    paths: Sequence[ModelPath], shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[ModelPath]:
    """Splits names like `block_3_up` into `block_3` and `up`, so that they are elements of a list.

    Functional models of Keras, and flat dicts, have such names. Blocks have several matrices: two
    numbers of a stem need two names with matrices in common.

    Args:
        paths: Path of each parameter.
        shapes: Shape of each parameter.
    """
    split, depth = list(paths), 0
    while any(depth < len(path) for path in split):
        numbers: dict[tuple, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        rows = []
        for i, path in enumerate(split):
            match = _INDEXED_PREFIX.match(str(path[depth])) if depth < len(path) else None
            if match:
                above, (stem, number, name) = path[:depth], match.groups()
                rows.append((i, (above, stem), number, name))
                if _is_matrix(shapes[i].shape):
                    numbers[above, stem][name].add(number)
        for i, place, number, name in rows:
            if sum(len(found) > 1 for found in numbers[place].values()) > 1:
                split[i] = (*place[0], place[1] + number, name, *split[i][depth + 1 :])
        depth += 1
    return split


def _is_matrix(shape: Sequence[int]) -> bool:
    return sum(n > 1 for n in shape) > 1


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


class _Source(NamedTuple):
    """The sources of a value.

    Attributes:
        bits: Bit mask of the parameters that it depends on.
        data: Whether it depends on data.
    """

    bits: int
    data: bool


_NOTHING = _Source(0, False)


def find_upstream(jaxpr: Any, num_consts: int, num_parameters: int) -> list[int | None]:
    """Finds the parameters upstream of each parameter, from the values it is combined with.

    In `y = tanh(x @ w0) @ w1`, parameter 0 is combined with data alone and parameter 1 with a value
    that depends on parameter 0: the answer is `[0b00, 0b01]`. A stack that a scan reads slice by
    slice is upstream of itself if a slice takes the result of the slice before it. Reads in a
    single equation, a loop or a conditional, have no order among themselves.

    Args:
        jaxpr: A function of constants, then parameters, then data.
        num_consts: Number of constants.
        num_parameters: Number of parameters.

    Returns:
        For each parameter, a bit mask of parameters, or None if no data meets it.
    """
    walk = _Walk(num_parameters)
    # Python's integers have any length: joining two sets is one operation even for 10,000
    # parameters.
    sources = [_NOTHING] * num_consts
    sources += [_Source(1 << i, False) for i in range(num_parameters)]
    walk.run(jaxpr, sources + [_Source(0, True)] * (len(jaxpr.invars) - len(sources)))
    return walk.found


class _Walk:
    """A walk through the equations of a function, nested calls included.

    Attributes:
        found: For each parameter, the parameters upstream of it so far, or None.
        known: Each set of parameters met so far, mapped to itself.
    """

    def __init__(self, num_parameters: int):
        self.found: list[int | None] = [None] * num_parameters
        self.known: dict[int, int] = {}  # equal numbers share one object, because they are long

    def run(self, jaxpr: Any, ins: Sequence[_Source]) -> list[_Source]:
        """Sources of a jaxpr's outputs, from the sources of its inputs."""
        values = [*[_NOTHING] * len(jaxpr.constvars), *ins]
        return jx.interpret(jaxpr, values, self._eqn, lambda atom: _NOTHING)

    def _eqn(self, eqn, ins: list[_Source]) -> list[_Source]:
        """Sources of an equation's results; calls and scans over layers are walked into."""
        name = eqn.primitive.name
        if inner := jx.called(eqn):
            return self.run(inner.jaxpr, ins)
        if name == "scan":
            consts, carry, xs = jx.scan_operands(eqn, ins)
            if any(s.bits and not s.data for s in xs):
                # The second iteration carries the first one's result. A stack, which is one
                # parameter, thus meets itself if its layers are in series.
                for _ in range(2):
                    out = self.run(jx.loop_body(eqn).jaxpr, [*consts, *carry, *xs])
                    carry = [*map(self._join, zip(carry, out[: len(carry)], strict=True))]
                return [*carry, *out[len(carry) :]]
        return [self._meet(eqn, ins)] * len(eqn.outvars)

    def _meet(self, eqn, ins: list[_Source]) -> _Source:
        """Joins an equation's operands; parameter-only operands meet the operands with data."""
        # Parameters combined only with each other, as in a sum of penalties, say nothing about
        # order.
        before = self._join([s for s in ins if s.data])
        joined = self._join(ins)
        if before.data:
            for atom, source in zip(eqn.invars, ins, strict=True):
                # A scalar made from parameters, such as a penalty, is not a layer's weights.
                if source.bits and not source.data and jx.num_elements(atom.aval) > 1:
                    self._record(source.bits, before.bits)
        return joined

    def _record(self, read: int, before: int) -> None:
        """Adds `before` to the parameters upstream of each parameter in `read`."""
        while read:
            lowest = read & -read
            i = lowest.bit_length() - 1
            self.found[i] = self._one((self.found[i] or 0) | before)
            read ^= lowest

    def _join(self, sources: Sequence[_Source]) -> _Source:
        bits = functools.reduce(operator.or_, (source.bits for source in sources), 0)
        return _Source(self._one(bits), any(s.data for s in sources))

    def _one(self, bits: int) -> int:
        return self.known.setdefault(bits, bits)


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
    given, paths = paths, _split_after_numbers([*map(module_path, paths)], shapes)
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
    places: Iterable[tuple[int, Index]], values: Iterable[Value], count: int
) -> list[Value | SlicedValue]:
    """Whole arrays, put together from their parts.

    Args:
        places: For each part the number of its array, and its index there.
        values: The parts.
        count: Number of arrays.
    """
    parts: list[dict[Index, Value]] = [{} for _ in range(count)]
    for (number, index), value in zip(places, values, strict=True):
        parts[number][index] = value
    return [stacked(rows) for rows in parts]


def _slice_of(key: ModelPath | None, layer: Index) -> ModelPath | None:
    """The block of one slice: the stack's key with the layer's number in place of `[]`."""
    if key is None or STACK not in key:
        return key
    at = key.index(STACK)
    return (*key[:at], *numbers(layer), *key[at + 1 :])


def common_prefix(paths: Sequence[ModelPath]) -> ModelPath:
    """The longest path that all paths start with."""
    columns = zip(*paths, strict=False)
    same = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    return tuple(column[0] for column in same)


def power(sequence: list[int]) -> int:
    """The largest k such that a sequence is another one repeated k times: 2 for [1, 2, 1, 2]."""
    n = len(sequence)
    for period in range(1, n + 1):
        if n % period == 0 and sequence[:period] * (n // period) == sequence:
            return n // period
    return 1
