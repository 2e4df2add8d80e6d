"""Matrix products in float8: codes of both operands, one product of codes, and its derivative.

An operand is divided by its scale, a power of two, so that its largest magnitude is at most 448,
and rounded to e4m3, a float8 with 3 bits of mantissa and 448 as its largest number. The product of
the codes is then multiplied by both scales. The derivative's two products are float8 products too:
of the codes of the result's cotangent with the codes that the forward made.

Example, with x of 2 x 2 and w of 2 x 1::

    x = [[7, -1], [2, 4]]     scale 1 / 64      codes [[448, -64], [128, 256]]
    w = [[0.3], [1.2]]        scale 1 / 256     codes [[80], [320]] (0.3 * 256 = 76.8 is rounded)
    codes' product            [[15360], [92160]]
    result                    times both scales: [[0.9375], [5.625]]; exactly [[0.9], [5.4]]

On a GPU with float8 units, XLA computes such a product by cuBLASLt, with codes as they are. On a
CPU it computes the same sums of the codes' products in fp32.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx

CODE = jnp.dtype(jnp.float8_e4m3fn)
# Approximate number of parts of a large array; their largest magnitudes are found in parallel.
_PARTS = 2048

Codes = tuple[jax.Array, jax.Array]
"""An operand's codes, and its scale: in bfloat16 if the operand is, else in fp32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductSpec:
    """The static description of a product: axes, dtypes, and the operands that need gradients.

    Attributes:
        contracted: The contracted axes of the left operand, and the matching ones of the right.
        batch: The batch axes of the left operand, and the matching ones of the right.
        ranks: The number of axes of each operand.
        dtypes: The dtype of each operand, and so of its gradient.
        dtype: The dtype of the result.
        needed: For each operand, whether it gets a gradient.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: tuple[int, int]
    dtypes: tuple[Any, Any]
    dtype: Any
    needed: tuple[bool, bool]

    @classmethod
    def of(cls, eqn: Any, needed: tuple[bool, bool]) -> "ProductSpec":
        """The form of a `dot_general` equation.

        Args:
            eqn: The equation.
            needed: For each operand, whether it gets a gradient.
        """
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        avals = [a.aval for a in eqn.invars]
        return cls(
            contracted=(tuple(left), tuple(right)),
            batch=(tuple(left_batch), tuple(right_batch)),
            ranks=(avals[0].ndim, avals[1].ndim),
            dtypes=(avals[0].dtype, avals[1].dtype),
            dtype=eqn.outvars[0].aval.dtype,
            needed=needed,
        )

    def free(self, side: int) -> tuple[int, ...]:
        """The axes of an operand that are in the result and are no batch axes, ascending."""
        taken = {*self.contracted[side], *self.batch[side]}
        return tuple(axis for axis in range(self.ranks[side]) if axis not in taken)


def coded(x: jax.Array) -> Codes:
    """The codes of an array, and its scale.

    Zeros have a scale above 0. If a number is not finite, the scale isn't either, and the product
    becomes NaN.
    """
    scale, inverse = _scale(x)
    # A power of two has an exact inverse, and a product takes fewer instructions than a division.
    codes = (x.astype(jnp.float32) * inverse).astype(CODE)
    # Transposes then read finished codes, for which XLA's kernels for a GPU are twice as fast.
    return jax.lax.optimization_barrier(codes), scale


def _scale(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest power of two that divides an array to at most 448 in magnitude, and its inverse.

    The array's scale is the largest one of its parts. XLA computes the scales of parts in the
    kernel that finds the largest, but the scale of one number in a kernel of its own.
    """
    sizes, axes = jnp.abs(x), tuple(range(x.ndim))
    for axis, parts in enumerate(itertools.accumulate(x.shape[:-1], operator.mul)):
        if parts >= _PARTS:
            each = math.gcd(x.shape[axis], parts // _PARTS)
            sizes = sizes.reshape(*x.shape[:axis], -1, each, *x.shape[axis + 1 :])
            axes = tuple(range(axis + 1, sizes.ndim))
            break
    largest = jax.lax.reduce_max(sizes, axes=axes)
    scales = _scales(largest.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
    # Differences of exponents. If a scale is not finite, they are any number.
    inverses = jax.lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
    # In the dtype in which results are scaled, because XLA casts one number in a kernel of its own.
    dtype = x.dtype if x.dtype == jnp.dtype(jnp.bfloat16) else jnp.float32
    axes = tuple(range(scales.ndim))
    scale = jax.lax.reduce_max(scales.astype(dtype), axes=axes)
    return scale, jax.lax.reduce_min(inverses, axes=axes)


def _scales(largest: jax.Array) -> jax.Array:
    """The smallest power of two that divides each of some positive numbers to at most 448.

    Numbers that are not finite are returned unchanged. Powers of two divide and multiply exactly,
    so that codes do not depend on how the compiler arranges a division.
    """
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    # 448 is 1.75 * 2**8: a larger mantissa carries to the exponent in this sum.
    powers = ((bits + 0x1FFFFF) & ~0x7FFFFF) - (8 << 23)
    # 2**-126 at least: a GPU takes smaller numbers as 0.
    scales = jax.lax.bitcast_convert_type(jax.lax.max(powers, jnp.int32(1 << 23)), jnp.float32)
    return jax.lax.select(jax.lax.is_finite(largest), scales, largest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(form: ProductSpec, left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two arrays in float8; its derivative is computed in float8 too.

    Args:
        form: The form of the product.
        left: The left operand, in fp32 or narrower.
        right: The right operand.
    """
    return _forward(form, left, right)[0]


def _forward(
    form: ProductSpec, left: jax.Array, right: jax.Array
) -> tuple[jax.Array, list[Codes | None]]:
    codes = coded(left), coded(right)
    result = _of_codes(codes[0], codes[1], form.contracted, form.batch, form.dtype)
    # An operand's gradient needs the codes of the opposite operand only.
    kept = zip(codes, reversed(form.needed), strict=True)
    return result, [pair if needed else None for pair, needed in kept]


def _backward(
    form: ProductSpec, kept: list[Codes | None], cotangent: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    codes = coded(cotangent) if any(form.needed) else None
    return _gradient(form, 0, codes, kept[1]), _gradient(form, 1, codes, kept[0])


product.defvjp(_forward, _backward)


def is_float8_product(eqn: Any) -> bool:
    """Whether an equation is a product of two arrays of codes."""
    return eqn.primitive.name == "dot_general" and all(a.aval.dtype == CODE for a in eqn.invars)


def count_numbers(jaxpr: Any) -> int:
    """Counts the numbers in operands and results of the float8 products of a jaxpr.

    An operand of several products counts once, because the compiler codes it once. The body of a
    `scan` counts once for each of its turns, all branches of a `cond` together.
    """
    found, coded = 0, set()
    for eqn in jx.opened(jaxpr).eqns:
        inner = jx.inner_jaxprs(eqn)
        if any(map(is_float8_product, (e for body in inner for e in body.eqns))):
            operands = set(jx.variables(eqn.invars)) - coded
            found += sum(jx.num_elements(v.aval) for v in (*operands, *eqn.outvars))
            coded |= operands
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        found += times * sum(map(count_numbers, inner))
    return found


def _gradient(form: ProductSpec, side: int, cotangent: Codes | None, other: Codes | None) -> Any:
    """The gradient of one operand; None if it is not needed."""
    if cotangent is None or other is None:
        return None
    own_free, other_free = form.free(side), form.free(1 - side)
    own, opposite = form.contracted[side], form.contracted[1 - side]
    # The result's axes are the batch axes, the left operand's free axes, then the right one's.
    num_batch = len(form.batch[0])
    first = num_batch + (len(own_free) if side == 0 else 0)
    pairs = [
        (cotangent, tuple(range(first, first + len(other_free))), tuple(range(num_batch))),
        (other, other_free, form.batch[1 - side]),
    ]
    # The gradient's axes are the batch axes, then this operand's free axes, then its contracted
    # axes, ordered by the opposite operand; with the pairs reversed, the last two swap. In the
    # operand's own order nothing has to be transposed.
    lies = [own_free, tuple(own[opposite.index(axis)] for axis in sorted(opposite))]
    if min(own, default=0) < min(own_free, default=0):
        pairs.reverse()
        lies.reverse()
    (left, of_left, left_batch), (right, of_right, right_batch) = pairs
    contracted, batch = (of_left, of_right), (left_batch, right_batch)
    found = _of_codes(left, right, contracted, batch, form.dtypes[side])
    places = [*form.batch[side], *lies[0], *lies[1]]
    return jnp.transpose(found, [places.index(axis) for axis in range(form.ranks[side])])


def _of_codes(left: Codes, right: Codes, contracted: Any, batch: Any, dtype: Any) -> jax.Array:
    """The product of two coded arrays."""
    # bf16 has fp32's range, and powers of two multiply exactly in it; float16 would overflow.
    wide = dtype if dtype == jnp.dtype(jnp.bfloat16) else jnp.float32
    sums = jax.lax.dot_general(left[0], right[0], (contracted, batch), preferred_element_type=wide)
    # One scale at a time, because the product of two small scales could be 0.
    return (sums * left[1].astype(wide) * right[1].astype(wide)).astype(dtype)
