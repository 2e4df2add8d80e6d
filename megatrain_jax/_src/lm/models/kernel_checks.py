"""The kernels of the extra `kernels`: whether a trace may call them, and checks of their results.

The library `jax-linear-attention` (its package is `jla`) computes the products of a mixture of
experts and the gated delta rule on an H100 or H200, on one device. A plan for such a card that is
made on another machine is traced as if the card and the library were there, and says so.

The library is young and compiles for one generation of GPUs. So the first trace that may call its
kernels compares a small case with the plain operations, once per process. That takes 5
seconds for experts and a quarter of a minute for the delta rule, mostly for compiling. If results
differ, or the kernels fail, a warning says so and the plain operations are used instead.
"""

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax import trace_target
from megatrain_jax._src.common.capability import capability_here
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.models.delta_rule import delta_rule, one_token
from megatrain_jax._src.lm.models.grouped_products import grouped_outer, grouped_product

# The version that the extra installs: the one that measurements and tests on a GPU used.
TESTED_VERSION = "0.1.0"
_HOPPER = 9.0
_CARDS = ("H100", "H200")  # also parts of a GH200's name
# Relative errors of arrays. A number that is rounded to bf16 once is wrong by 0.002.
_PRODUCT_TOLERANCE, _DELTA_RULE_TOLERANCE = 0.005, 0.03


def has_grouped_products() -> bool:
    """Whether a GPU with working kernels, here or in a plan, computes the grouped products."""
    return _has(_products_agree)


def has_delta_rule() -> bool:
    """Whether a GPU with working kernels, here or in a plan, computes the gated delta rule."""
    return _has(_delta_rules_agree)


def _has(agree: Callable[[], bool]) -> bool:
    return may_be_called() and (trace_target().card is not None or agree())


def may_be_called() -> bool:
    """Whether one Hopper GPU computes the trace, with the kernels installed or planned."""
    target = trace_target()
    if target.num_devices > 1:
        return False
    if target.card is not None:
        return any(name in target.card for name in _CARDS)
    return is_installed() and capability_here() == _HOPPER


@cache
def is_installed() -> bool:
    """Whether this environment has the library of kernels."""
    return importlib.util.find_spec("jla") is not None


def untested_version() -> str | None:
    """The installed version of the library; None if it is the tested one, or none is installed."""
    try:
        found = metadata.version("jax-linear-attention")
    except metadata.PackageNotFoundError:
        return None
    return None if found == TESTED_VERSION else found


@cache
def _products_agree() -> bool:
    return _agree("experts", _products, _PRODUCT_TOLERANCE)


@cache
def _delta_rules_agree() -> bool:
    return _agree("the delta rule", _delta_rules, _DELTA_RULE_TOLERANCE)


def _agree(purpose: str, both: Callable[[], tuple[Any, Any]], most: float) -> bool:
    """Whether a kernel's arrays equal the expected ones; warns if they don't."""
    try:
        # The loss is being traced in this thread; in a new thread, JAX computes at once.
        with ThreadPoolExecutor(max_workers=1) as thread:
            found, expected = thread.submit(both).result()
        errors = [_error(*pair) for pair in zip(found, expected, strict=True)]
    except Exception as error:  # whatever a foreign kernel raises, the run can do without it
        reason = f"fail on this machine ({type(error).__name__}: {str(error).strip()[:200]})"
    else:
        # A comparison with NaN is false.
        if all(error <= most for error in errors):
            return True
        reason = f"give other results than JAX's operations (relative errors {errors})"
    version = untested_version()
    hint = (
        f". Version {version} is installed; {TESTED_VERSION} is the one to install"
        if version
        else ""
    )
    warn_user(
        f"The kernels for {purpose} of jax-linear-attention {reason}, so JAX's own operations "
        f"compute instead, more slowly{hint}",
    )
    return False


def _error(found: Any, expected: Any) -> float:
    found, expected = (np.asarray(x).astype(np.float32) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)


def _products() -> tuple[Sequence[Any], Sequence[Any]]:
    """Both products and a gradient of unequal groups, one of them empty; and the expected ones."""
    sizes = np.array([100, 0, 57, 99], np.int32)
    ends = np.cumsum(sizes)
    x, other, matrices = _normal(0, 256, 128), _normal(1, 256, 256), _normal(2, 4, 256, 128)

    @jax.jit
    def found(x, other, matrices, sizes):
        to_other = grouped_product(x, matrices, sizes, out_first=True)
        to_x = grouped_product(other, matrices, sizes, out_first=False)
        return to_other, to_x, grouped_outer(other, x, sizes)

    wide = [array.astype(np.float32) for array in (x, other, matrices)]
    groups = [
        (wide[0][end - size : end], wide[1][end - size : end], matrix)
        for size, end, matrix in zip(sizes, ends, wide[2], strict=True)
    ]
    expected = (
        np.concatenate([a @ m.T for a, _, m in groups]),
        np.concatenate([b @ m for _, b, m in groups]),
        np.stack([b.T @ a for a, b, _ in groups]),
    )
    return found(x, other, matrices, sizes), expected


def _delta_rules() -> tuple[Sequence[Any], Sequence[Any]]:
    """Results and gradients of two documents in 150 tokens, by the kernels and token by token."""
    q, k, v = _normal(0, 1, 150, 1, 128), _normal(1, 1, 150, 1, 128), _normal(2, 1, 150, 2, 128)
    numbers = np.abs(_normal(3, 1, 150, 2).astype(np.float32))
    rate = (1 / (1 + numbers)).astype(jnp.bfloat16)
    segments = (np.arange(150)[None] >= 71).astype(np.int32)
    cotangent = _normal(4, *v.shape)

    def gradients(rule):
        def all_of(*operands):
            out, transposed = jax.vjp(lambda *args: rule(*args, segments), *operands)
            return out, *transposed(cotangent.astype(out.dtype))

        return jax.jit(all_of)

    operands = q, k, v, -numbers, rate
    found = gradients(delta_rule)(*operands)
    return found, gradients(_by_token)(*(array.astype(np.float32) for array in operands))


def _by_token(q: Any, k: Any, v: Any, log_decay: Any, rate: Any, segments: Any) -> Any:
    """The gated delta rule by its definition, token by token: it compiles faster than chunks."""
    first = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0

    def step(state, token):
        starts, *operands = (x[None] for x in token)
        out, state = one_token(jnp.where(starts, 0.0, state), *operands)
        return state, out[0]

    (rows, _, heads, width), key_width = v.shape, k.shape[-1]
    assert rows == 1
    state = jnp.zeros((rows, k.shape[2], heads // k.shape[2], key_width, width), jnp.float32)
    tokens = [x[0] for x in (first, q, k, v, log_decay, rate)]
    return jax.lax.scan(step, state, tokens)[1][None]
