"""A jaxpr computed tile by tile gives what it gives whole, and most of its values never exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from inside import on_one_device
from megatrain_jax._src.build.step_kernels import step_kernels
from megatrain_jax._src.program.tiling.tiled import tiled
from optimizers import OPTIMIZERS
from runs import check_close, make_spec
from zoo import CASES

TOLERANCE = 2e-6
# A sample of the zoo; the others are long.
SAMPLE = ("nnx_tied", "moe", "dropout_linen", "batchnorm_nnx")


def stage_kernels(case):
    """The jaxpr of each forward and backward of a case's stages, with its name."""
    spec = make_spec(case, OPTIMIZERS["adam"])
    kernels = step_kernels(spec.first, spec.layouts, spec.optimizer, on_one_device())
    for kernel in dict.fromkeys(k for k in kernels if k.name in ("forward", "backward")):
        leaves, tree = jax.tree.flatten(kernel.takes)
        function = kernel.build()

        def flat(*args, function=function, tree=tree):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, args)))

        yield kernel.name, jax.make_jaxpr(flat)(*leaves)


def arguments(jaxpr, seed=0):
    """Random arguments of a jaxpr: small numbers, which are tokens and positions, too."""
    rng = np.random.default_rng(seed)

    def argument(aval):
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            return jnp.asarray(0.3 * rng.normal(size=aval.shape), aval.dtype)
        return jnp.asarray(rng.integers(0, 2 if aval.dtype == bool else 8, aval.shape), aval.dtype)

    return [argument(aval) for aval in jaxpr.in_avals]


def check_same(jaxpr, num_tiles, args, whole=None):
    """Checks that tiles give what the whole gives; says whether there are tiles."""
    division = tiled(jaxpr, num_tiles)
    if division is None:
        return False
    whole = jax.jit(jaxpr_as_fun(jaxpr))(*args) if whole is None else whole
    parts = jax.jit(division)(*args)
    assert [x.dtype for x in parts] == [x.dtype for x in whole]
    check_close(parts, list(whole), TOLERANCE, "result")
    return True


@pytest.mark.parametrize(
    "name",
    [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_stages_of_the_zoo_in_tiles_give_what_they_give_whole(name):
    seen = 0
    for _, jaxpr in stage_kernels(CASES[name]):
        args = arguments(jaxpr)
        whole = jax.jit(jaxpr_as_fun(jaxpr))(*args)
        seen += sum(check_same(jaxpr, k, args, whole) for k in (2, 4))
    assert seen > 0
