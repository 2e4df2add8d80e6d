"""The scale of the loss in a run that computes in float16, and its change from step to step.

float16 has no numbers below 6e-8, where many gradients lie. So the cotangent of the loss is the
scale instead of 1, and updates divide gradients by it. A scale that is too large shows as a
gradient that is not finite: the step is skipped and the scale halved. After many good steps it is
doubled, since gradients become smaller during training. These are the rule and the numbers of
`jmp.DynamicLossScale`, with an upper bound.

Example: a gradient overflows in the first step. The last row counts good steps since a change::

    step           1        2        3        ...   2001     2002
    scale          2**15    2**14    2**14          2**14    2**15
    skipped        yes      no       no             no       no
    count after    0        1        2              0        1
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.kernel import Kernel

# Powers of two, so that scaling changes only exponents.
_FIRST, _LEAST, _MOST = 2.0**15, 1.0, 2.0**24
# Good steps after which the scale is doubled.
_PERIOD = 2000

Scaling = tuple[jax.Array, jax.Array]
"""The scale of the next step's loss, fp32, and the good steps since it changed, int32."""


def scaling_of(facts: Mapping[str, Any] | None) -> Scaling:
    """The scale and its count of good steps from a checkpoint's facts, or their first values."""
    facts = facts or {"scale": _FIRST, "good_steps": 0}
    return jnp.float32(facts["scale"]), jnp.int32(facts["good_steps"])


def as_facts(scaling: Scaling) -> dict[str, Any]:
    """The scale and its count of good steps as facts of a checkpoint, from arrays at rest."""
    scale, good = jax.device_get(scaling)
    return {"scale": float(scale), "good_steps": int(good)}


def can_be_halved(scale: float) -> bool:
    """Whether a scale is above the least one."""
    return scale > _LEAST


def change() -> Kernel:
    """The kernel `(scale, good steps, ok) -> (scale, good steps)` at the end of a step."""

    def changed(scale: jax.Array, good: jax.Array, ok: jax.Array) -> Scaling:
        full = good + 1 >= _PERIOD
        grown = jnp.where(full, jnp.minimum(2 * scale, _MOST), scale)
        halved = jnp.maximum(scale / 2, _LEAST)
        return jnp.where(ok, grown, halved), jnp.where(ok & ~full, good + 1, 0)

    return Kernel(name="change scale", key=_PERIOD, build=lambda: changed)
