"""Products in float8: the product alone against NumPy, and runs against plain JAX."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megatrain_jax._src.engine.program import float8

CODE = ml_dtypes.float8_e4m3fn


def codes_of(x):
    """The codes and the scale of an array, by NumPy: what an operand counts as."""
    x = x.astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / 448))
    return (x / scale).astype(CODE).astype(np.float64), scale


def forms():
    """Random operands of products: free, contracted and batch axes in any order."""
    rng = np.random.default_rng(0)
    for number in range(24):
        sizes = rng.permutation([2, 3, 5, 6, 7, 4])
        counts = rng.integers(0, 2), rng.integers(1, 3), rng.integers(0, 3), rng.integers(1, 3)
        letters = iter("abcdefgh")
        batch, inner, left, right = ([next(letters) for _ in range(n)] for n in counts)
        size = dict(zip("abcdefgh", [*sizes, 2, 3], strict=True))
        axes = [rng.permutation([*batch, *inner, *free]) for free in (left, right)]
        arrays = [rng.normal(size=[size[a] for a in own]).astype(np.float32) for own in axes]
        out = "".join([*batch, *(a for a in axes[0] if a in left),
                       *(a for a in axes[1] if a in right)])  # fmt: skip
        dtype = ("float32", "bfloat16", "float16")[number % 3]
        yield f"{''.join(axes[0])},{''.join(axes[1])}->{out}", dtype, arrays


@pytest.mark.by_default(
    "ab,abc->ac float32", "acb,aed->cbed float16", "bacd,efacb->adef float32", "ab,bac->ac float32"
)
@pytest.mark.parametrize(
    ("formula", "dtype", "arrays"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in forms()]
)
def test_a_product_and_its_gradients_are_those_of_the_codes(formula, dtype, arrays):
    left, right = (jnp.asarray(x, dtype) for x in arrays)
    (axes, other), out = formula.split("->")[0].split(","), formula.split("->")[1]
    inner = [a for a in axes if a in other and a not in out]
    batch = [a for a in out if a in axes and a in other]
    numbers: Any = tuple(
        tuple(tuple(own.index(a) for a in group) for own in (axes, other))
        for group in (inner, batch)
    )

    def plain(x, y):
        return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.dtype(dtype))

    (eqn,) = jax.make_jaxpr(plain)(left, right).eqns
    form = float8.ProductSpec.of(eqn, (True, True))
    result: Any
    result, pull = jax.vjp(lambda x, y: float8.product(form, x, y), left, right)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=result.shape), result.dtype)
    gradients = pull(cotangent)

    values = {
        text: codes_of(np.asarray(x))
        for text, x in ((axes, left), (other, right), (out, cotangent))
    }
    for text, found in ((out, result), (axes, gradients[0]), (other, gradients[1])):
        a, b = (text_of for text_of in values if text_of != text)
        (x, scale), (y, other_scale) = values[a], values[b]
        expected = np.einsum(f"{a},{b}->{text}", x, y) * scale * other_scale
        assert found.dtype == jnp.dtype(dtype) and found.shape == expected.shape
        # Sums of codes are exact in fp32 but for their last bits, and rounded to the dtype.
        rtol = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
        most = np.abs(expected).max()
        np.testing.assert_allclose(np.float64(found), expected, rtol=rtol, atol=2**-22 * most)


def form_of(x, y, *needed: bool) -> float8.ProductSpec:
    (eqn,) = jax.make_jaxpr(jnp.matmul)(x, y).eqns
    return float8.ProductSpec.of(eqn, (needed[0], needed[1]))


def of(x, y) -> np.ndarray:
    result: Any = float8.product(form_of(x, y, True, True), x, y)
    return np.asarray(result, np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_stay_zeros_and_small_or_large_operands_are_scaled(dtype):
    x, y = jnp.ones((3, 4), dtype), jnp.full((4, 2), 0.5, dtype)
    zeros = jnp.zeros_like(x)
    for one, other in itertools.permutations([zeros, x]):
        other = other.reshape(4, 3)
        np.testing.assert_array_equal(of(one, other), 0.0)
    # A smaller scale would count as 0.
    assert float8.coded(zeros)[1] == float8.coded(x * 2.0**-120)[1] == 2.0**-126
    for factor in (2.0**-100, 2.0**-40, 2.0**40, 2.0**100):
        np.testing.assert_allclose(
            np.asarray(of(x * factor, y / factor), np.float32), 2.0, rtol=2**-7
        )


@pytest.mark.parametrize("largest", [224, 225, 447, 448, 449, 463, 465, 480, 496, 511, 3e30])
def test_the_largest_number_keeps_three_bits_and_does_not_overflow(largest):
    x = jnp.array([[largest, largest / 3, -largest / 448]], jnp.float32)
    assert float8.coded(x)[1] == codes_of(np.asarray(x))[1]
    np.testing.assert_allclose(of(x, jnp.eye(3)), x, rtol=1 / 16)


@pytest.mark.parametrize("shape", [(5,), (1, 3), (2048, 3), (3, 4096, 2), (7, 5, 999, 2, 1)])
@pytest.mark.parametrize("exponent", [-100, 0, 9, 119, 127])
def test_scales_and_codes_are_those_of_the_whole_array(shape, exponent):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x = np.ldexp(x / np.abs(x).max(), exponent)
    # The largest number's row is the last one, the first one, and one between.
    for shift in (0, 1, x.size // 2):
        moved = np.roll(x.ravel(), -shift - np.abs(x).argmax()).reshape(shape)
        codes, scale = float8.coded(jnp.asarray(moved))
        largest = np.abs(moved).max().astype(np.float64)
        expected = max(2.0 ** np.ceil(np.log2(largest / 448)), 2.0**-126)
        assert float(scale) == expected
        exact = np.float64(moved) / expected
        np.testing.assert_array_equal(codes, exact.astype(np.float32).astype(codes.dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1])
def test_what_is_not_finite_stays_so(bad, at):
    arrays = [jnp.ones((3, 4)), jnp.ones((4, 2))]
    arrays[at] = arrays[at].at[1, 1].set(bad)
    assert not np.isfinite(of(*arrays)).any()


def test_an_operand_without_a_gradient_keeps_nothing_of_the_other():
    x, y = jnp.ones((3, 4)), jnp.full((4, 2), 2.0)
    for needed in itertools.product([False, True], repeat=2):
        _, kept = float8._forward(form_of(x, y, *needed), x, y)
        assert [pair is not None for pair in kept] == list(reversed(needed))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_multiplies_the_codes_that_a_cpu_multiplies(dtype):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size) for size in ((512, 1024), (1024, 768), (512, 768))]

    def all_three(x, y, cotangent):
        form = form_of(x, y, True, True)
        result, pull = jax.vjp(lambda x, y: float8.product(form, x, y), x, y)
        return result, *pull(cotangent)

    found = []
    for platform, options in (("gpu", {"xla_gpu_enable_triton_gemm": False}), ("cpu", None)):
        device = jax.devices(platform)[0]
        placed = [jax.device_put(jnp.asarray(x, dtype), device) for x in arrays]
        compiled = jax.jit(all_three, compiler_options=options).lower(*placed).compile()
        if platform == "gpu":
            assert str(compiled.as_text()).count('"__cublas$lt$matmul$f8"') == 3
        found.append([np.asarray(x, np.float64) for x in compiled(*placed)])
    for ours, theirs in zip(*found, strict=True):
        # Sums of float8 products are kept in fewer bits than fp32 has.
        np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-3 * np.abs(theirs).max())
