"""Each operation is divided into tiles along the axes that its rule allows, and no others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import random_functions
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import (
    _RULES,
    MAPPED,
    Axes,
    Label,
    params_of_part,
    shape_of,
)
from megatrain_jax._src.engine.program.tiling.tiled import _wide_product, tile_of_bits
from runs import check_close
from tilings import TOLERANCE, all_divisions, flat_jaxpr, in_loops, loops_of

X = np.random.default_rng(0).uniform(0.1, 0.9, (4, 6, 8)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 4, (4, 6))
# An operation of each kind that has a rule, some in several ways.
RULED = {
    "argmax": lambda x: jnp.argmax(x, 1),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (4, 2, 6, 8)) + jnp.ones((2, 6, 8)),
    "concatenate": lambda x: jnp.concatenate([x, x[:, :2]], 1),
    "convolution": lambda x: jax.lax.conv(x, jnp.ones((2, 6, 3)), (1,), "SAME"),
    "grouped convolution": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((6, 1, 3)), (1,), "SAME", feature_group_count=6
    ),
    "cumulative": lambda x: (jnp.cumsum(x, 0), jax.lax.cumlogsumexp(x, 1), jax.lax.cummax(x, 2)),
    "dot": lambda x: jax.lax.dot_general(x, 2 * x, (((1,), (1,)), ((2,), (2,)))),
    "dynamic slice": lambda x: jax.lax.dynamic_slice(x, (1, 0, IDS[0, 0]), (4, 2, 3)),
    "dynamic update": lambda x: jax.lax.dynamic_update_slice(x, 2 * x[:, :2], (0, IDS[0, 0], 0)),
    "embedding": lambda x: x[IDS],
    "embedding of columns": lambda x: x[:, :, IDS],
    "embedding of windows": lambda x: jax.vmap(
        lambda at: jax.lax.dynamic_slice_in_dim(x, at, 2, 1)
    )(IDS[0]),
    "folds": lambda x: (x.sum(0), x.max((0, 1)), x.min(1), x.prod(2), (x > 0.5).all(0),
                        (x > 0.5).any((1, 2)), jax.lax.reduce_xor(IDS, (0,)) + x.mean()),
    "matrices": lambda x: jax.lax.linalg.triangular_solve(
        x[:, :2, :2] + 3 * jnp.eye(2), x[:, :2], left_side=True
    ),
    "random bits": lambda x: x * jax.random.bits(jax.random.key(0), x.shape).astype(x.dtype),
    "sharding constraint": lambda x: jax.lax.with_sharding_constraint(
        x, NamedSharding(Mesh(jax.devices()[:2], "data"), PartitionSpec(None, "data"))
    ),
    "iota": lambda x: x + jax.lax.broadcasted_iota(x.dtype, x.shape, 1),
    "pad": lambda x: jnp.pad(x, [(0, 0), (1, 2), (0, 0)]),
    "pad between": lambda x: jax.lax.pad(x, 1.0, [(0, 0, 0), (0, 0, 1), (-1, 2, 0)]),
    "pooling": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 1), (1, 2, 1), "VALID"),
    "pooling with strides": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 2, 1), (2, 2, 1), "VALID"
    ),
    "pooling with padding": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 2, 1), (1, 2, 1), ((1, 1), (0, 0), (0, 0))
    ),
    "pooling with holes": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 2, 1), (1, 2, 1), "VALID", base_dilation=(1, 1, 2)
    ),
    "reshape": lambda x: (x.reshape(24, 8), x.reshape(4, 48), x.reshape(4, 3, 2, 8), x.reshape(-1)),
    "reverse": lambda x: jnp.flip(x, 1),
    "scatter add": lambda x: jnp.zeros((5, 8)).at[IDS].add(x),
    "scatter columns": lambda x: jnp.zeros((4, 6, 9)).at[:, :, IDS[0]].add(x[:, :, :6]),
    "scatter into a slice": lambda x: jnp.zeros((4, 8, 8)).at[:, 1:3].add(x[:, :2]),
    "scatter extremes": lambda x: (jnp.ones((5, 8)).at[IDS].min(x), x[0].at[IDS].max(2 * x)),
    "scatter product": lambda x: jnp.ones((5, 8)).at[IDS].mul(x),
    "scatter set": lambda x: jnp.zeros((5, 8)).at[IDS].set(x),
    "select": lambda x: jnp.where(x > 0.5, x, 0) + jnp.where(x.sum() > 0, x, 2 * x),
    "slice": lambda x: (x[:, 1:5], x[::2], x[:, :, ::2]),
    "sort": lambda x: jax.lax.sort((x, 2 * x), dimension=1, num_keys=1),
    "split": lambda x: jnp.split(x, 2, 1),
    "stack": lambda x: jnp.stack([x, x, x], 2),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "take along": lambda x: jnp.take_along_axis(x, IDS[:, :, None], 2),
    "put along": jax.grad(lambda x: (jnp.take_along_axis(x, IDS[:, :, None], 2) ** 2).sum()),
    "top k": lambda x: jax.lax.top_k(x, 3),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "unstack": lambda x: jnp.unstack(x, axis=1),
}  # fmt: skip


@pytest.mark.by_default(
    "embedding of windows",
    "pad between",
    "pooling with strides",
    "pooling with padding",
    "pooling with holes",
    "scatter into a slice",
    "scatter set",
    "random bits",
    "sharding constraint",
)
@pytest.mark.parametrize("name", RULED)
def test_an_operation_is_divided_along_every_axis_that_its_rule_allows(name):
    # Made in tiles and read in tiles: otherwise nothing would be seen of the operation.
    jaxpr = flat_jaxpr(lambda x: jax.tree.map(lambda y: 2 * y, RULED[name](jnp.sqrt(x))), X)
    whole = list(jax.jit(jaxpr_as_fun(jaxpr))(X))
    divided = set()
    for division in all_divisions(jaxpr, 2):
        divided |= in_loops(division)
        check_close(jax.jit(division)(X), whole, TOLERANCE, "result")
    assert divided - {"sqrt", "mul"}


def parts_by_rule(eqn):
    """The equation on half of its arrays for each group of axes, and the shapes of all arrays."""
    count, arrays = len(eqn.invars), range(len(eqn.invars) + len(eqn.outvars))
    axes, whole = Axes(eqn), [shape_of(eqn, at) for at in arrays]
    groups = [axes.together(at, axis) for at in arrays for axis in range(len(whole[at]))]
    for places, kind in filter(None, groups):
        axis_of = dict(places)
        # Without a divided operand, as an iota, a part is not by shapes alone.
        sizes = [whole[at][axis] for at, axis in places if at < count]
        if not sizes or any(size % 2 for size in sizes):
            continue
        shapes = [
            tuple(n // 2 if axis_of.get(at) == axis else n for axis, n in enumerate(whole[at]))
            for at in arrays
        ]
        params = eqn.params
        if kind == MAPPED:
            axis = axis_of[count]
            params = params_of_part(eqn, axis, axis_of.get(0), shapes[count][axis])
        yield eqn.replace(params=params), shapes


def test_parts_of_operands_give_as_large_a_part_of_the_results():
    """By shapes alone, which differ along all axes: nothing is compiled."""
    seen, rules = set(), set()
    for function in RULED.values():
        for eqn in jx.equations(flat_jaxpr(function, X)):
            if rule := _RULES.get(eqn.primitive.name):
                rules.add(rule.__qualname__)
            for part, shapes in parts_by_rule(eqn):
                given = [
                    jax.ShapeDtypeStruct(shape, v.aval.dtype)
                    for shape, v in zip(shapes, eqn.invars, strict=False)
                ]
                found = jax.eval_shape(lambda *args, part=part: jx.bind(part, args), *given)
                assert [x.shape for x in found] == shapes[len(given) :], part
                seen.add(eqn.primitive.name)
    assert len(seen) > 30
    assert rules == {rule.__qualname__ for rule in _RULES.values()}


def test_axes_that_a_constraint_shards_are_not_divided():
    (eqn,) = jx.equations(flat_jaxpr(RULED["sharding constraint"], X))
    assert [Axes(eqn).together(0, axis) is not None for axis in range(3)] == [True, False, True]


@pytest.mark.by_default("0")
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.long) if s > 1 else s for s in range(24)]
)
def test_random_functions_in_tiles_give_what_they_give_whole(seed):
    """In fp64, so that a wrong element can't be taken for rounding."""
    with jax.enable_x64(True):
        args, function = random_functions.inputs(seed), random_functions.random_function(seed)
        jaxpr = flat_jaxpr(function, *args)
        whole = jax.jit(jaxpr_as_fun(jaxpr))(*args)
        # Another axis for each seed.
        division = next(itertools.islice(all_divisions(jaxpr, 2), seed % 5, None))
        parts = jax.jit(division)(*args)
        check_close(parts, list(whole), 1e-12, "result")


@pytest.mark.exhaustive
def test_dropout_draws_the_same_bits():
    """Every bit of a mask, wherever its axis of tokens lies, and of numbers beyond 32 bits."""
    x, w = jnp.ones((3, 64, 8)), jnp.ones((8, 100))

    def masked(key, x, w):
        h = jnp.tanh(x @ w)
        keep = jax.random.bernoulli(key, 0.75, h.shape)
        noise = jax.random.normal(jax.random.fold_in(key, 1), (100, 64))
        return keep, jnp.where(keep, h, 0) @ w.T, noise, (noise @ h[0]).sum(0)

    jaxpr = flat_jaxpr(masked, jax.random.key(0), x, w)
    args = jax.random.key(0), x, w
    whole = jax.jit(jaxpr_as_fun(jaxpr))(*args)
    drawn = 0
    for division in all_divisions(jaxpr, 4):
        parts = jax.jit(division)(*args)
        for mine, theirs in zip(parts[0::2], whole[0::2], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        drawn += "random_bits" in in_loops(division)
    assert drawn > 0


@pytest.mark.by_default("uint32-shape0", "uint16-shape2")
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("uint32", (3, 2**31)),
        ("uint8", (2**20, 5, 2**13)),
        # Adding the number of the tile wraps around the lower word.
        ("uint16", (5, 3 * 2**30)),
        ("uint32", (3, 2, 2 * 999_999_937)),
    ],
)
def test_bits_of_one_tile_are_those_of_its_elements(dtype, shape):
    """Of an array that would fill gigabytes; the oracle is Threefry on numbers that Python has."""
    key = jax.random.key(7)
    (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, shape, dtype))(key).eqns
    while eqn.primitive.name != "random_bits":
        (eqn,) = jx.opened(eqn.params["jaxpr"]).eqns
    axis = int(np.argmax(shape))
    num_tiles = shape[axis] // 2
    for tile in (0, 12345, num_tiles - 1):
        label = Label(axis, 1, 2)
        own = (2 if a == axis else n for a, n in enumerate(shape))
        places = np.indices(tuple(own)).reshape(len(shape), -1)
        places[axis] += 2 * tile
        numbers = np.ravel_multi_index(tuple(places), shape).astype(np.uint64)
        halves = [jnp.asarray(x, jnp.uint32) for x in (numbers >> np.uint64(32), numbers)]
        first, second = threefry2x32_p.bind(*(jnp.full(len(numbers), k) for k in
                                              jax.random.key_data(key)), *halves)  # fmt: skip
        got = tile_of_bits(eqn, label, tile, num_tiles, key)
        np.testing.assert_array_equal(got.reshape(-1), (first ^ second).astype(dtype))
    assert numbers.max() >= 2**32


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_bits_of_all_tiles_are_those_of_the_whole_array(dtype):
    with jax.enable_x64(True):
        key = jax.random.key(7)
        (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, (2, 4), dtype))(key).eqns
        while eqn.primitive.name != "random_bits":
            (eqn,) = jx.opened(eqn.params["jaxpr"]).eqns
        tiles = [tile_of_bits(eqn, Label(1, 1, 2), tile, 2, key) for tile in range(2)]
        whole = jax.random.bits(key, (2, 4), dtype)
        np.testing.assert_array_equal(jnp.concatenate(tiles, axis=1), whole)
        assert tiles[0].dtype == whole.dtype


def test_products_of_words_have_all_64_bits():
    rng = np.random.default_rng(0)
    numbers = np.append(rng.integers(0, 2**32, 1000), [0, 1, 2**16 - 1, 2**16, 2**32 - 1])
    for factor in (1, 2**16 - 1, 2**16, 2**32 - 1, *rng.integers(1, 2**32, 20)):
        exact = numbers.astype(np.uint64) * np.uint64(factor)
        high, low = _wide_product(jnp.asarray(numbers, jnp.uint32), int(factor))
        np.testing.assert_array_equal(high, exact >> np.uint64(32))
        np.testing.assert_array_equal(low, exact & np.uint64(2**32 - 1))


@pytest.mark.by_default("32")
@pytest.mark.parametrize("num_tiles", [2, 32])
def test_narrow_sums_of_every_kind_are_as_near_to_the_exact_ones_as_one_rounding(num_tiles):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.uniform(size=(64, 8)), jnp.bfloat16) for _ in range(2))
    ids = jnp.asarray(rng.integers(0, 4, 64))

    def sums(x, y, ids):
        x, y = 2 * x, jnp.maximum(y, 0.1)
        kernel = jax.lax.conv_general_dilated(
            x.T[None], y.T[None], (1,), "VALID", dimension_numbers=("NWC", "OWI", "NWC")
        )
        total = jax.lax.reduce_sum(x, (0,))  # jnp's own sum converts before
        return x.T @ y, total, jnp.zeros((4, 8), x.dtype).at[ids].add(y), kernel

    jaxpr = flat_jaxpr(sums, x, y, ids)
    exact = sums(x.astype(jnp.float32), y.astype(jnp.float32), ids)
    seen = set()
    for division in all_divisions(jaxpr, num_tiles):
        parts = jax.jit(division)(x, y, ids)
        summed = [v for loop in loops_of(division) for v in loop.summed]
        for number, (mine, right) in enumerate(zip(parts, exact, strict=True)):
            assert mine.dtype == jnp.bfloat16
            if division.flow.outputs[number] in summed:
                seen.add(number)
                np.testing.assert_allclose(mine.astype(jnp.float32), right, rtol=2**-8)
    assert seen == {0, 1, 2, 3}
