"""The gated delta rule as primitives that a Hopper GPU computes by the kernels of `jla.ops`.

The kernels keep the state in fp32, and read and write everything else in the dtype of the values.
Backward computes the forward's factors again, so nothing but the operands is saved.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.kernel_primitives import KernelCosts, define
from megatrain_jax._src.lm.models.delta_rule import delta_rule_and_state

_WIDTHS = (64, 128)
_CHUNK = 64  # tokens that the kernels process at a time
_DTYPES = (jnp.bfloat16, jnp.float16)


def fits(q: Any, k: Any, v: Any) -> bool:
    """Whether the kernels support queries, keys and values of these dtypes and widths."""
    widths = {k.shape[-1], v.shape[-1]}
    same = q.dtype == k.dtype == v.dtype and v.dtype in _DTYPES
    return same and widths.issubset(_WIDTHS) and v.shape[1] > 0


@jax.custom_vjp
def delta_rule(q: Any, k: Any, v: Any, log_decay: Any, rate: Any, segments: Any) -> Any:
    """Computes `gated_delta_rule`; its documents may be None."""
    return _forward_p.bind(*_operands(q, k, v, log_decay, rate, segments))


def _operands(*given: Any) -> list[Any]:
    return [array for array in given if array is not None]


def _forward(q, k, v, log_decay, rate, segments):
    saved = q, k, v, log_decay, rate, segments
    return delta_rule(*saved), saved


def _backward(saved, cotangent):
    *differentiated, segments = saved
    found = _backward_p.bind(*_operands(cotangent, *saved))
    dsegments = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
    return *found, dsegments


delta_rule.defvjp(_forward, _backward)


# Jitted so that the layers of a function share one lowering.
@jax.jit
def _on_gpu(q, k, v, log_decay, rate, segments=None):
    from jla.ops import linear_attention  # pyright: ignore[reportMissingImports]

    return linear_attention(
        "gated_deltanet",
        q,
        k,
        v,
        g=log_decay,
        beta=rate,
        segment_ids=segments,
        use_qk_l2norm=True,
        impl="mosaic_gpu",
    )[0]


def _elsewhere(q, k, v, log_decay, rate, segments=None):
    return delta_rule_and_state(q, k, v, log_decay, rate, segments)[0]


def _gradients_of(compute):
    @jax.jit
    def gradients(cotangent, *operands):
        differentiated, segments = operands[:5], operands[5:]
        return jax.vjp(lambda *args: compute(*args, *segments), *differentiated)[1](cotangent)

    return gradients


def _flops(eqn: Any, *, first: int, times: int) -> int:
    """Counts the operations of the rule in chunks, `times` over; keys are operand `first + 1`.

    Within a chunk, keys meet keys and queries, and weights meet values twice; the state is read by
    keys and by queries and written once.
    """
    keys, values = (eqn.invars[first + n].aval.shape for n in (1, 2))
    width, value_width = keys[-1], values[-1]
    of_token = 4 * _CHUNK * (width + value_width) + 6 * width * value_width
    return times * math.prod(values[:3]) * of_token


def _workspace(eqn: Any, *, first: int, has_gradients: bool) -> int:
    keys, values = (eqn.invars[first + n].aval.shape for n in (1, 2))
    itemsize = eqn.outvars[0].aval.dtype.itemsize
    tokens = math.prod(values[:3])  # times heads of values
    # Normalised queries and keys, and the inverse of each chunk's corrections. XLA's figure on an
    # H200, for 8,192 tokens, 16 heads of keys and 32 of values of width 128, is 98 MiB; this, 96.
    forward = 2 * math.prod(keys) * itemsize + tokens * _CHUNK * itemsize
    if not has_gradients:
        return forward
    # Also the states before all chunks and their gradients: 389 MiB; this, 384.
    states = 2 * tokens * keys[-1] * values[-1] * itemsize // _CHUNK
    return forward + states + tokens * _CHUNK * itemsize


_PURPOSE = "the gated delta rule"
_forward_p = define(
    "delta_rule_forward",
    lambda q, k, v, *_: v,
    _on_gpu,
    _elsewhere,
    KernelCosts(
        purpose=_PURPOSE,
        flops=partial(_flops, first=0, times=1),
        workspace=partial(_workspace, first=0, has_gradients=False),
    ),
)
_backward_p = define(
    "delta_rule_backward",
    lambda cotangent, *operands: list(operands[:5]),
    _gradients_of(_on_gpu),
    _gradients_of(_elsewhere),
    # The gradient takes about three times as many operations. Its first operand is the cotangent.
    KernelCosts(
        purpose=_PURPOSE,
        flops=partial(_flops, first=1, times=3),
        workspace=partial(_workspace, first=1, has_gradients=True),
    ),
    several=True,
)
