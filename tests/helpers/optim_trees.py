"""Small parameter trees cut into groups, and a run of a cut optimizer beside plain Optax.

The trees have blocks side by side or stacked, with matrices, vectors and single numbers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf, find_leaves
from megatrain_jax._src.engine.program.layers.sliced_values import Index, index_of, joined, selector
from megatrain_jax._src.engine.program.layers.stacks import Stack
from megatrain_jax._src.engine.program.optimizer.cut import (
    Fragment,
    OptimizerCut,
    assemble_state,
    cut_optimizer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree of parameters as the optimizer and as the store see it."""

    build: Callable[[Sequence[Any]], Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    leaves: tuple[Leaf, ...]
    group_of: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return max(self.group_of) + 1

    @property
    def blocks(self) -> list[int]:
        """The groups that are blocks."""
        found = {g for g, leaf in zip(self.group_of, self.leaves, strict=True) if leaf.block}
        return sorted(found)

    def cut(self, optimizer: Any, **options: Any) -> OptimizerCut:
        groups = self.group_of, self.num_groups
        return cut_optimizer(optimizer, self.build, self.shapes, self.leaves, *groups, **options)

    def by_group(self, arrays: Sequence[Any]) -> list[list[Any]]:
        groups: list[list[Any]] = [[] for _ in range(self.num_groups)]
        for g, leaf in zip(self.group_of, self.leaves, strict=True):
            groups[g].append(arrays[leaf.parameter][selector(leaf.index)])
        return groups

    def whole(self, groups: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """The whole parameters of their leaves by group: the inverse of `by_group`."""
        rows: list[list[tuple[Index, Any]]] = [[] for _ in self.shapes]
        each = [iter(g) for g in groups]
        for g, leaf in zip(self.group_of, self.leaves, strict=True):
            rows[leaf.parameter].append((leaf.index, next(each[g])))
        return [joined(row, s.shape) for row, s in zip(rows, self.shapes, strict=True)]


def make_tree(shapes: Any, stacked: str | None = None, axes: Sequence[int] = (0,)) -> Tree:
    """A tree from nested shapes; `stacked` names the part whose layers are stacked along `axes`."""
    flat, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    paths = [tuple(k.idx if hasattr(k, "idx") else k.key for k in path) for path, _ in flat]
    structs = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for _, s in flat)
    stacks = []
    if stacked:
        ids = tuple(i for i, p in enumerate(paths) if p[0] == stacked)
        layers = tuple(
            index_of(axes, at) for at in np.ndindex(*(structs[ids[0]].shape[a] for a in axes))
        )
        stacks.append(Stack(slices=dict.fromkeys(ids, layers), layers=layers, named=ids))
    leaves = find_leaves(paths, structs, stacks, [None] * len(paths))
    numbers: dict[Any, int] = {}
    group_of = tuple(numbers.setdefault(x.block or x.path[:1], len(numbers)) for x in leaves)
    return Tree(
        build=lambda arrays: jax.tree.unflatten(treedef, list(arrays)),
        shapes=structs,
        leaves=leaves,
        group_of=group_of,
    )


def _ends(d: int) -> dict[str, Any]:
    return {"embed": {"w": (24, d)}, "head": {"w": (d, 24), "b": (24,)}}


def rows_of_blocks(n: int = 3, d: int = 12) -> Tree:
    block = {"w1": (d, 2 * d), "w2": (2 * d, d), "b": (d,), "gain": ()}
    return make_tree({**_ends(d), "blocks": [block] * n})


def stacked_blocks(n: int = 3, d: int = 12) -> Tree:
    layers = {"w1": (n, d, 2 * d), "w2": (n, 2 * d, d), "b": (n, d), "gain": (n,)}
    return make_tree({**_ends(d), "layers": layers}, stacked="layers")


def blocks_along_axis_1(n: int = 3, d: int = 12) -> Tree:
    layers = {"w1": (d, n, 2 * d), "w2": (2 * d, n, d), "b": (d, n)}
    return make_tree({**_ends(d), "layers": layers}, stacked="layers", axes=(1,))


def groups_of_blocks(n: int = 2, d: int = 12) -> Tree:
    layers = {"w1": (n, n, d, 2 * d), "b": (n, n, d), "gain": (n, n)}
    return make_tree({**_ends(d), "layers": layers}, stacked="layers", axes=(0, 1))


TREES = {"rows": rows_of_blocks, "stacked": stacked_blocks}


class Runner:
    """Runs a cut as the engine does, with one compiled program for equal fragments."""

    def __init__(self, tree: Tree, cut: OptimizerCut, params: Sequence[Any]):
        self.tree, self.cut, self.compiled = tree, cut, {}
        self.params = tree.by_group(params)
        fragments = zip(cut.initial_state, self.params, strict=True)
        self.state = [self.run(fragment, *arrays) for fragment, arrays in fragments]
        starts = zip(cut.initial_scalars, self.params, strict=True)
        scalars = [x for fragment, arrays in starts for x in self.run(fragment, *arrays)]
        self.globals = self.run(cut.initial_globals, *scalars)

    def run(self, fragment: Fragment, *args: Any) -> list[Any]:
        if fragment.key not in self.compiled:
            self.compiled[fragment.key] = jax.jit(
                lambda *a: jx.evaluate(fragment.jaxpr, [*fragment.consts, *a]),
                compiler_options={"xla_backend_optimization_level": 0},
            )
        return self.compiled[fragment.key](*args)

    def step(self, grads: Sequence[Any], loss: Any) -> None:
        cut, by_group = self.cut, self.tree.by_group(grads)
        scalars = []
        for g, fragment in enumerate(cut.reduce):
            arrays = (*by_group[g], *self.params[g], *self.state[g])
            scalars += self.run(fragment, *arrays, loss, *self.globals)
        out = self.run(cut.combine, loss, *self.globals, *scalars)
        messages, self.globals = out[: cut.num_messages], out[cut.num_messages :]
        for g, fragment in enumerate(cut.apply):
            own = [messages[i] for i in cut.messages[g]]
            new = self.run(fragment, *by_group[g], *self.params[g], *self.state[g], *own)
            count = len(self.params[g])
            self.params[g], self.state[g] = new[:count], new[count:]


def run_both(tree: Tree, make: Callable[[Any], Any], steps: int = 5, bad_step: int | None = None):
    """Trains with the cut and with Optax on the same gradients.

    Returns:
        The cut, what the cut gave and what Optax gave, the latter two as (params, state).
    """
    rng = np.random.default_rng(0)
    draw = lambda: [rng.normal(size=s.shape).astype(np.float32) for s in tree.shapes]  # noqa: E731
    start = draw()
    params = jax.tree.map(jnp.asarray, tree.build(start))
    optimizer = make(params)
    cut = tree.cut(optimizer)
    runner = Runner(tree, cut, start)
    extended = optax.with_extra_args_support(optimizer)

    def update(params, state, grads, loss):
        try:
            updates, state = extended.update(grads, state, params, value=loss)
        except TypeError:  # contrib.sam takes no `value`
            updates, state = extended.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole = jax.jit(update, compiler_options={"xla_backend_optimization_level": 0})
    state = optimizer.init(params)
    for step in range(steps):
        grads, loss = draw(), jnp.float32(2.0 - step * step / 9)
        if step == bad_step:
            grads[0][0] = np.nan
        runner.step(grads, loss)
        params, state = whole(params, state, tree.build(list(map(jnp.asarray, grads))), loss)
    mine = (
        tree.build(tree.whole(runner.params)),
        assemble_state(cut, runner.state, runner.globals),
    )
    return cut, mine, (params, state)


def worst_difference(mine: Any, theirs: Any) -> float:
    """The largest difference between two trees, relative to the largest element of its leaf."""
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if b.size:
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst
