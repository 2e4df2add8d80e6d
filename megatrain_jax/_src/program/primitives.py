"""The table of JAX's primitives: what the library has to know of each of them, by its name.

An elementwise primitive may be applied to the slices of a stacked array one by one, to leaves of
any shape lined up in one slab, or not at all where a count only asks what it costs. All of this
follows from one line here. A primitive that a newer JAX adds, or that an older one lacks, is a
name that no equation has. `tests/test_primitives.py` evaluates every one of them, and fails if
JAX has an elementwise primitive that is missing here.

To add one, put its name into

- `_NUMBERS` if it computes a number of each element, as `exp` does: an operation an element;
- `_LOGIC` if it compares, selects or turns bits, `_CONVERSIONS` if it changes how an element is
  written: neither costs floating-point operations;
- `REDUCTIONS`, `ARG_REDUCTIONS` or `CUMULATIVE` if it goes along axes, an operation an element of
  its operand (`pieces.FOLDS` says how two slices are reduced to one);
- `LAYOUT` if it only rearranges elements, or takes some of them, with a rule in `grid.py`;
- `FREE` if its results are no arrays of their own in memory.

`axis_rules.py` says along which axes one that is not elementwise can be divided into tiles, or into
the slices of a stack.

What costs more than an operation an element, as a product, is counted in `flops.py`.
"""

from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elementwise, one floating-point operation an element of the result.
_NUMBERS = _names(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac
    integer_pow lgamma log log1p log2 logistic max min mul mulhi neg nextafter one_minus_square
    polygamma polynomial pow rem round rsqrt sign sin sinh sqrt square sub tan tanh zeta
    """
)
# Elementwise, of truth values and bits.
_LOGIC = _names(
    """
    and clz eq eq_to ge gt is_finite le le_to lt lt_to ne not or population_count select_n
    shift_left shift_right_arithmetic shift_right_logical xor
    """
)
# Elementwise, the same numbers written otherwise.
_CONVERSIONS = _names(
    """
    bitcast_convert_type complex conj convert_element_type copy imag name real reduce_precision
    stop_gradient
    """
)
ELEMENTWISE = _NUMBERS | _LOGIC | _CONVERSIONS
# It iterates until all elements of an array have converged, so that the last bits of each depend on
# the others: it costs as much, but is not elementwise.
ARITHMETIC = _NUMBERS | {"regularized_incomplete_beta"}

# Reductions along `axes`, to one value and to its position; running ones along `axis`.
REDUCTIONS = _names("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
ARG_REDUCTIONS = _names("argmax argmin")
CUMULATIVE = _names("cumlogsumexp cummax cummin cumprod cumsum")

# What only rearranges elements, or takes some of them.
LAYOUT = _names(
    "broadcast_in_dim dynamic_slice gather reshape rev slice split squeeze transpose unstack"
)

# What only renames an array, or is made anew wherever it is read; what a compiler makes one with
# what reads it, so that its results are no arrays; and what can be one with what it reads.
FREE = _names(
    """
    broadcast_in_dim convert_element_type copy expand_dims iota optimization_barrier reshape slice
    squeeze stop_gradient transpose
    """
)
FUSED = ELEMENTWISE | FREE
FUSING = FUSED | REDUCTIONS | ARG_REDUCTIONS | CUMULATIVE | {"concatenate", "dynamic_update_slice"}

PRODUCTS = _names("conv_general_dilated dot_general ragged_dot_general")

# Functions of whole matrices, of which an operand may hold many, along its first axes.
MATRICES = _names("cholesky eigh lu qr schur svd triangular_solve tridiagonal")

# What makes random numbers or keys, beside all that is called `random_...`.
_DRAWS = _names("philox2x32 philox4x32 rng_bit_generator rng_uniform threefry2x32 threefry4x32")

# It gives its operands back, and only keeps a compiler from moving operations past it.
BARRIER = "optimization_barrier"

# Equations that only call a jaxpr, with the parameter that holds it; a `remat` does, too.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMAT = ("remat2", "checkpoint")
CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
# A literal among their operands tells the compiler what is computed, or how often.
DECIDING = ("cond", "while")


def is_elementwise(eqn: Any) -> bool:
    """Whether each element of an equation's results comes from the same element of its operands.

    An operand may be a scalar, or of length 1 along some axes: several elements read it then. A
    `bitcast_convert_type` to another width has results of another shape, and is none.
    """
    if eqn.primitive.name not in ELEMENTWISE:
        return False
    shape = eqn.outvars[0].aval.shape
    return all(not a.aval.shape or _is_repeated_to(a.aval.shape, shape) for a in eqn.invars)


def _is_repeated_to(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    return len(shape) == len(result) and all(
        n in (1, m) for n, m in zip(shape, result, strict=True)
    )


def draws(name: str) -> bool:
    """Whether a primitive of this name makes random numbers or keys."""
    return name.startswith("random_") or name in _DRAWS
