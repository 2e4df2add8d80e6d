"""The table of JAX primitives: properties that the library needs to know, by name.

An elementwise primitive may be applied to the slices of a stacked array one by one, or to leaves of
any shape lined up in one slab. One entry here is enough for all such uses. Names that the installed
JAX lacks match no equation. `test_primitives.py` evaluates every primitive, and fails if JAX has an
elementwise one that is missing here.

To add a primitive, put its name into

- `_NUMBERS` if it computes each element as `exp` does, at one operation per element;
- `_LOGIC` if it compares, selects or manipulates bits, `_CONVERSIONS` if it changes an element's
  representation: both cost no floating-point operations;
- `REDUCTIONS`, `ARG_REDUCTIONS` or `CUMULATIVE` if it works along axes, at one operation per
  element of its operand (`pieces.FOLDS` says how two slices are reduced to one);
- `LAYOUT` if it only rearranges or selects elements, with a rule in `slicewise.py`;
- `JOINING` if it puts several arrays side by side;
- `FREE` if its results need no memory of their own.

`axes.py` gives, for primitives that are not elementwise, the axes along which they can be
divided into tiles, over devices or into the slices of a stack.

Primitives that cost more than one operation per element, such as products, are counted in
`flops.py`.
"""

from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elementwise, one floating-point operation per element of the result.
_NUMBERS = _names(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac
    integer_pow lgamma log log1p log2 logistic max min mul mulhi neg nextafter one_minus_square
    polygamma polynomial pow rem round rsqrt sign sin sinh sqrt square sub tan tanh zeta
    """
)
# Elementwise, on truth values and bits.
_LOGIC = _names(
    """
    and clz eq eq_to ge gt is_finite le le_to lt lt_to ne not or population_count select_n
    shift_left shift_right_arithmetic shift_right_logical xor
    """
)
# Elementwise, the same numbers in a different representation.
_CONVERSIONS = _names(
    """
    bitcast_convert_type complex conj convert_element_type copy imag name real reduce_precision
    stop_gradient
    """
)
ELEMENTWISE = _NUMBERS | _LOGIC | _CONVERSIONS
# It iterates until all elements of an array have converged, so each element's last bits depend on
# all of them: it costs as much, but is not elementwise.
ARITHMETIC = _NUMBERS | {"regularized_incomplete_beta"}

# Reductions along `axes`, to a value and to its position; running ones along `axis`.
REDUCTIONS = _names("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
ARG_REDUCTIONS = _names("argmax argmin")
CUMULATIVE = _names("cumlogsumexp cummax cummin cumprod cumsum")
WINDOW_REDUCTIONS = _names("reduce_window_max reduce_window_min reduce_window_sum")

# Operations that only rearrange or select elements.
LAYOUT = _names(
    "broadcast_in_dim dynamic_slice gather reshape rev slice split squeeze transpose unstack"
)

# Operations with results that need no array: they rename one, are recreated wherever they are read,
# or are fused by the compiler with their readers or operands.
FREE = _names(
    """
    broadcast_in_dim convert_element_type copy expand_dims iota optimization_barrier reshape slice
    squeeze stop_gradient transpose
    """
)
FUSED = ELEMENTWISE | FREE
# Operations that put several arrays side by side: along an axis that they have, or along a new one.
JOINING = _names("concatenate stack")
FUSING = FUSED | REDUCTIONS | ARG_REDUCTIONS | CUMULATIVE | JOINING | {"dynamic_update_slice"}

PRODUCTS = _names("conv_general_dilated dot_general ragged_dot_general")

# Functions of whole matrices; an operand may hold a batch of them along its first axes.
MATRICES = _names("cholesky eigh lu qr schur svd triangular_solve tridiagonal")

# Primitives that make random numbers or keys, besides those named `random_...`.
_DRAWS = _names("philox2x32 philox4x32 rng_bit_generator rng_uniform threefry2x32 threefry4x32")

# Returns its operands; it only keeps the compiler from moving operations past it.
BARRIER = "optimization_barrier"

# Equations that only call a jaxpr: plainly, with its results recomputed, or with a derivative rule.
CALLS = _names("jit pjit closed_call core_call")
REMAT = _names("remat2 checkpoint")
CUSTOM_RULES = _names("custom_jvp_call custom_vjp_call")
# With a literal operand, the compiler knows the branch taken or the number of iterations.
DECIDING = ("cond", "while")


def is_elementwise(eqn: Any) -> bool:
    """Whether each element of an equation's results depends on the same element of its operands.

    An operand may be a scalar, or have length 1 along some axes: several elements then read it. A
    `bitcast_convert_type` to another width changes the shape, and is not elementwise.
    """
    if eqn.primitive.name not in ELEMENTWISE:
        return False
    shape = eqn.outvars[0].aval.shape
    operands = [a.aval.shape for a in eqn.invars if a.aval.shape]
    same_rank = all(len(own) == len(shape) for own in operands)
    lengths = (pair for own in operands for pair in zip(own, shape, strict=True))
    return same_rank and all(n in (1, m) for n, m in lengths)


def draws(name: str) -> bool:
    """Whether a primitive with this name makes random numbers or keys."""
    return name.startswith("random_") or name in _DRAWS
