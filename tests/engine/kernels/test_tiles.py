"""Operations of kernels on tiles: Pallas lowers each to Triton, and the results are JAX's own."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from megatrain_jax._src.engine.kernels.tiles import (
    ON_TILES,
    evaluate_on_tile,
    fits_tile,
    has_triton,
)
from megatrain_jax._src.engine.program import float8
from megatrain_jax._src.engine.program import jaxpr as jx

SHAPE = (64, 64)
_BINARY = {"add", "div", "max", "min", "mul", "pow", "rem", "sub"}
_COMPARED = {"eq", "ge", "gt", "le", "lt", "ne"}
_LOGIC = {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}


def applied(name, x, number):
    """A result with the operation of this name, of an array and a number."""
    if name in _BINARY:
        return getattr(jax.lax, name)(getattr(jax.lax, name)(x, number), x)
    if name in _COMPARED:
        return jax.lax.select_n(getattr(jax.lax, name)(x, number), x, -x)
    if name in _LOGIC:
        return jax.lax.select_n(_LOGIC[name](x > 0, number > x), x, -x)
    if name in ("not", "is_finite"):
        found = ~(x > 0) if name == "not" else jnp.isfinite(x)
        return jax.lax.select_n(found, x, -x)
    if name == "select_n":
        return jax.lax.select_n(number > 0, x, -x)
    if name == "clamp":
        return jax.lax.clamp(-number, x, number)
    if name == "integer_pow":
        return jax.lax.integer_pow(x, 3)
    if name == "convert_element_type":
        return x.astype(float8.CODE).astype(jnp.float32)
    return getattr(jax.lax, name)(x)


NAMES = sorted(ON_TILES - {"add_any"})


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_has_every_operation(name):
    def kernel(x, number, out):
        out[...] = applied(name, x[...], number[0]).astype(jnp.float32)

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (SHAPE, (1,))]
    call = pl.pallas_call(
        kernel,
        out_shape=avals[0],
        grid=(1,),
        compiler_params=triton.CompilerParams(num_warps=4),
    )
    device = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(call).trace(*avals).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_operations_on_tiles_are_those_of_jax(name, dtype):
    rng = np.random.default_rng(0)
    x, number = jnp.asarray(rng.gamma(2.0, size=(8, 16)), dtype), jnp.asarray(1.5, dtype)
    traced = jx.trace(functools.partial(applied, name), x, number)
    eqns = traced.jaxpr.eqns
    assert name in str(eqns) and all(fits_tile(eqn, x.shape) for eqn in eqns)
    values = dict(zip(traced.jaxpr.invars, (x, number), strict=True))
    evaluate_on_tile(eqns, values, x.shape)
    (found,) = (values[v] for v in traced.jaxpr.outvars)
    expected = applied(name, x, number)
    assert found.dtype == expected.dtype
    # A CPU rounds a few functions of bfloat16 more often.
    tolerance = 0 if dtype == "float32" else 2.0**-5
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=tolerance)


def test_a_kernel_needs_a_gpu_with_triton():
    def gpus(*versions):
        return [SimpleNamespace(compute_capability=version) for version in versions]

    assert has_triton(gpus("9.0", "8.0")) and has_triton(gpus("10.3"))
    assert not has_triton(gpus("7.5", "9.0")) and not has_triton(gpus("gfx942"))
    assert not has_triton(jax.devices()[:1])
