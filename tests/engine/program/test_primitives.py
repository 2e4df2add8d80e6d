"""The table of primitives against JAX: each is what the table calls it, and none is missing."""

import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import primitives
from megatrain_jax._src.engine.program.flops import count_flops
from megatrain_jax._src.engine.program.layers.sliced_values import (
    FOLDS,
    SlicedValue,
    Value,
    constant,
    grid_of,
    piece,
    sliced,
    stack,
)
from megatrain_jax._src.engine.program.layers.slicewise import slicewise
from megatrain_jax._src.engine.program.optimizer.elementwise import find_elementwise_functions

PRIMITIVES = {
    p.name: p
    for module in (jax.lax, jax_primitives)
    for p in vars(module).values()
    if isinstance(p, Primitive)
}
# What not every supported version of JAX has.
NEWER = {"log2", "one_minus_square", "polynomial"}
# Parameters of those that need some; the others take none, or an accuracy.
PARAMS: dict[str, dict[str, Any]] = {
    "bitcast_convert_type": {"new_dtype": np.dtype(np.int32)},
    "conj": {"input_dtype": np.dtype(np.float32)},
    "convert_element_type": {
        "new_dtype": np.dtype(np.float16), "weak_type": False, "sharding": None,
    },
    "integer_pow": {"y": 3},
    "name": {"name": "kept"},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 7},
    "round": {"rounding_method": jax.lax.RoundingMethod.TO_NEAREST_EVEN},
}  # fmt: skip
FROM_ONE = {"acosh", "zeta"}  # they are not numbers below
SHAPE = (6, 5, 4)


def operand(name: str, dtype: Any, seed: int, shape: tuple[int, ...] = SHAPE) -> jax.Array:
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    if jnp.issubdtype(dtype, jnp.inexact):
        values = rng.uniform(0.1, 0.9, shape) + (name in FROM_ONE)
        return jnp.asarray(values * (1 + 0.5j if dtype == np.complex64 else 1), dtype)
    return jnp.asarray(rng.integers(0, 2 if dtype is bool else 9, shape), dtype)


def example(name: str) -> tuple[Any, list[jax.Array]] | None:
    """The jaxpr of one equation of a primitive, with the first operands that it takes."""
    params = [PARAMS[name]] if name in PARAMS else [{}, {"accuracy": None}]
    dtypes = (np.float32, np.int32, np.complex64, bool)
    for dtype, count, given in itertools.product(dtypes, (1, 2, 3), params):
        which = [bool] if name == "select_n" else []
        kinds = [*which, *[dtype] * (count - len(which))]
        operands = [operand(name, kind, k) for k, kind in enumerate(kinds)]
        try:
            jaxpr = jax.make_jaxpr(lambda *x, given=given: PRIMITIVES[name].bind(*x, **given))(
                *operands
            )
            jx.evaluate(jx.opened(jaxpr), operands)
        except Exception:  # whatever it says of operands or parameters that are not its own
            continue
        if jaxpr.eqns:
            return jx.opened(jaxpr), operands
    return None


def same_bits(mine: Any, theirs: Any) -> None:
    mine, theirs = np.asarray(mine), np.asarray(theirs)
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(mine.view(np.uint8), theirs.view(np.uint8))


def in_pieces(x: jax.Array, axes: tuple[int, ...]) -> Any:
    """An array as its slices along some axes."""
    cells = []
    for at in np.ndindex(*(x.shape[a] for a in axes)):
        index: list[Any] = [slice(None)] * x.ndim
        for a, i in zip(axes, at, strict=True):
            index[a] = i
        cells.append(Value(x[tuple(index)]))
    return sliced(x.shape, axes, cells)


def test_a_piece_of_what_is_in_slices_is_that_of_the_array():
    x = operand("piece", np.float32, 0)
    subsets = [axes for n in (1, 2) for axes in itertools.combinations(range(x.ndim), n)]
    runs = [Value(part) for part in jnp.split(x, x.shape[0] // 2)]
    values = [SlicedValue(grid_of((len(runs),), runs), (0,), 2)]
    values += [in_pieces(x, axes) for axes in subsets]
    for value, axes in itertools.product(values, subsets):
        at = tuple(x.shape[a] - 1 - i for i, a in enumerate(axes))
        index = tuple(dict(zip(axes, at, strict=True)).get(a, slice(None)) for a in range(x.ndim))
        same_bits(piece(value, axes, at).array, x[index])


@pytest.mark.parametrize("name", sorted(primitives.ELEMENTWISE))
def test_elementwise_primitives_give_slices_and_slabs_what_they_give_arrays(name):
    if name not in PRIMITIVES and name in NEWER:
        return
    found = example(name)
    assert found is not None
    jaxpr, operands = found
    (eqn,) = jaxpr.eqns
    assert primitives.is_elementwise(eqn)
    whole = jx.evaluate(jaxpr, operands)
    for axes in [(0,), (1, 2)]:
        split = [in_pieces(operands[0], axes), *map(Value, operands[1:])]
        for mine, theirs in zip(slicewise(eqn, split) or [], whole, strict=True):
            same_bits(stack(mine).array, theirs)
    rows = [[k] for k in range(len(operands))]
    lined_up = find_elementwise_functions(jaxpr, [SHAPE], rows, [[0]])
    assert lined_up is not None
    for function in lined_up[1]:
        (mine,) = function([x.reshape(-1) for x in operands], {})
        same_bits(mine.reshape(SHAPE), whole[0])
    floats = jx.is_float(eqn.outvars[0].aval)
    counted = name in primitives.ARITHMETIC and floats
    cost = 2 * (len(operands) - 2) if name == "polynomial" else 1
    assert count_flops(jaxpr) == whole[0].size * cost * counted


def test_leaves_with_unlike_numbers_are_updated_by_functions_of_their_own():
    shapes = [(2, 3), (5,)]
    leaves = [jnp.full(s, n, jnp.float32) for n, s in enumerate([*shapes, *shapes], 1)]
    jaxpr = jax.make_jaxpr(lambda a, b, da, db: (a - 0.5 * da, b - 0.25 * db))(*leaves).jaxpr
    found = find_elementwise_functions(jaxpr, shapes, [[0, 1], [2, 3]], [[0, 1]])
    assert found is not None
    kinds, functions = found
    assert kinds == (0, 1)
    for kind, (old, gradient, factor) in zip(kinds, [(1, 3, 0.5), (2, 4, 0.25)], strict=True):
        lined_up = [jnp.full(9, x, jnp.float32) for x in (old, gradient)]
        (new,) = functions[kind](lined_up, {})
        np.testing.assert_array_equal(new, old - factor * gradient)


def reduced(name: str, axes: tuple[int, ...]) -> tuple[Any, jax.Array]:
    """A reduction or a running one of a sample array, and its operand."""
    is_bool = name in ("reduce_and", "reduce_or", "reduce_xor")
    x = operand(name, np.int32 if is_bool else np.float32, 0)
    if name in primitives.CUMULATIVE:
        function = getattr(jax.lax, name)
        return jax.make_jaxpr(lambda x: function(x, axis=axes[0]))(x), x
    if name in primitives.ARG_REDUCTIONS:
        function = getattr(jax.lax, name)
        return jax.make_jaxpr(lambda x: function(x, axes[0], np.int32))(x), x
    function = getattr(jax.lax, name)
    return jax.make_jaxpr(lambda x: function(x, axes))(x), x


ALONG_AXES = primitives.REDUCTIONS | primitives.ARG_REDUCTIONS | primitives.CUMULATIVE


@pytest.mark.parametrize("name", sorted(ALONG_AXES))
def test_reductions_of_slices_are_those_of_the_array(name):
    for axes, along in itertools.product([(0,), (1, 2)], [(0,), (1,), (2,)]):
        jaxpr, x = reduced(name, along)
        (eqn,) = jx.opened(jaxpr).eqns
        assert not primitives.is_elementwise(eqn)
        found = slicewise(eqn, [in_pieces(x, axes)])
        if found is None:
            # The slices of one axis are compared or summed up: only two can be made one.
            assert name not in FOLDS and not set(along).isdisjoint(axes)
            continue
        np.testing.assert_allclose(
            stack(found[0]).array, jx.evaluate(jx.opened(jaxpr), [x])[0], rtol=1e-6
        )


def test_there_is_a_fold_for_each_reduction():
    assert FOLDS.keys() == primitives.REDUCTIONS


REARRANGED = {
    "broadcast_in_dim": lambda x: jax.lax.broadcast_in_dim(x, (2, *x.shape), (1, 2, 3)),
    "dynamic_slice": lambda x: (
        jax.lax.dynamic_slice(x, (2, 1, 0), (3, 2, 4)),
        jax.lax.dynamic_slice(x, (9, 0, 1), (4, 5, 2)),
    ),
    "gather": lambda x: (
        x[np.array([3, 0, 3])],
        x[:, np.array([[4, 0], [1, 1]])],
        x.at[np.array([-1, 0, 6])].get(mode="clip", wrap_negative_indices=False),
        x.at[np.array([-1, 0])].get(mode="fill", wrap_negative_indices=False),
    ),
    "reshape": lambda x: (x.reshape(2, 3, 5, 4), x.reshape(6, 20)),
    "rev": lambda x: jax.lax.rev(x, (0, 2)),
    "slice": lambda x: jax.lax.slice(x, (1, 0, 1), (5, 5, 4), (2, 1, 1)),
    "split": lambda x: (jax.lax.split(x, (2, 4)), jax.lax.split(x, (1, 4), 1)),
    "squeeze": lambda x: (jax.lax.squeeze(x[:1], (0,)), jax.lax.squeeze(x[:, :1], (1,))),
    "transpose": lambda x: jax.lax.transpose(x, (2, 0, 1)),
    "unstack": lambda x: [jnp.unstack(x, axis=axis) for axis in range(3)],
}


@pytest.mark.parametrize("name", sorted(primitives.LAYOUT))
def test_what_rearranges_slices_gives_what_it_gives_arrays(name):
    x = operand(name, np.float32, 0)
    jaxpr = jx.trace(REARRANGED[name], x)
    env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.invars, [*jaxpr.consts, x], strict=True))
    seen = 0
    for eqn in jaxpr.jaxpr.eqns:
        ins = [a.val if jx.is_literal(a) else env[a] for a in eqn.invars]
        whole = jx.bind(eqn, ins)
        env.update(zip(eqn.outvars, whole, strict=True))
        if eqn.primitive.name != name:
            continue
        for axes in [(0,), (0, 1), (1, 2), (2,)]:
            split = [in_pieces(ins[0], axes), *(constant(np.asarray(i)) for i in ins[1:])]
            found = slicewise(eqn, split)
            seen += found is not None
            for mine, theirs in zip(found or [], whole, strict=bool(found)):
                same_bits(stack(mine).array, theirs)
    assert seen > 0


def is_elementwise(jaxpr: Any, operands: list[jax.Array]) -> bool:
    """Whether each element of the results depends on that element of the operands alone."""
    if any(getattr(v.aval, "shape", None) != SHAPE for v in jaxpr.outvars):
        return False
    whole = [np.asarray(x) for x in jx.evaluate(jaxpr, operands)]
    order = np.random.default_rng(0).permutation(np.prod(SHAPE))

    def turned(x):
        return np.asarray(x).reshape(-1)[order].reshape(SHAPE)

    other = jx.evaluate(jaxpr, [jnp.asarray(turned(x)) for x in operands])
    return all(
        np.array_equal(turned(x), y, equal_nan=np.issubdtype(y.dtype, np.inexact))
        for x, y in zip(whole, map(np.asarray, other), strict=True)
    )


# An identity of several arrays at once, what only keeps its operand alive, and an iteration that
# goes on until all elements of an array have converged: in their last bits these depend on others.
APART = {"optimization_barrier", "dce_sink", "regularized_incomplete_beta"}


@pytest.mark.exhaustive
def test_the_table_lacks_no_elementwise_primitive_of_jax():
    unknown = PRIMITIVES.keys() - primitives.ELEMENTWISE - APART
    missing = []
    for name in sorted(n for n in unknown if not primitives.draws(n)):
        found = example(name)
        if found is not None and is_elementwise(*found):
            missing.append(name)
    assert not missing


def test_a_primitive_that_the_table_lacks_would_be_found(monkeypatch):
    lacking = {"acos", "igamma", "select_n", "is_finite"}
    monkeypatch.setattr(primitives, "ELEMENTWISE", primitives.ELEMENTWISE - lacking)
    for name in lacking:
        found = example(name)
        assert found is not None and is_elementwise(*found)


@pytest.mark.parametrize("is_typed", [True, False])
def test_what_makes_numbers_or_keys_draws(is_typed):
    key = jax.random.key(0) if is_typed else jax.random.PRNGKey(0)
    for function, expected in (
        (jax.random.split, True),
        (lambda key: jax.random.fold_in(key, 1), True),
        (jax.random.bits, True),
        (jax.random.normal, True),
        (lambda key: key.reshape(1, *key.shape), False),
    ):
        jaxpr = jax.make_jaxpr(function)(key)
        found = [jx.contains(e, lambda e: primitives.draws(e.primitive.name)) for e in jaxpr.eqns]
        assert any(found) == expected


def test_every_name_of_the_table_is_one_of_jax():
    known = primitives.ELEMENTWISE | ALONG_AXES | primitives.LAYOUT | primitives.PRODUCTS
    assert {n for n in known - PRIMITIVES.keys() if not hasattr(jax.lax, n)} <= NEWER
