"""Makes the parts of a training recipe from names: precision and schedule."""

import math

import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import megatrain_jax as mt
from megatrain_jax._src.lm.cli.setting_rules import (
    Decay,
    Frozen,
    Master,
    PrecisionName,
    Products,
    State,
    Sums,
)


def precision_of(
    name: PrecisionName,
    state: State | None,
    master: Master | None,
    frozen: Frozen | None,
    compute: DTypeLike | None = None,
    *,
    without: DTypeLike | None = None,
    sums: Sums = "float32",
    products: Products | None = None,
) -> mt.Precision:
    """The precision of a run.

    Args:
        name: Name of a precision; the other arguments override its parts.
        state: Form of optimizer state; None for the named precision's.
        master: Form of the masters; None for the named precision's.
        frozen: Form of frozen parameters; None for the masters' form.
        compute: dtype that parameters are cast to for the model's computation; None for the named
            precision's.
        without: The same if neither has one; None for the GPU's own, bfloat16 or float16.
        sums: Form of sums of gradients over microbatches.
        products: Form of products with parameters; None for `compute`. "float8" leaves small
            ones as they are, "float8-all" does not.

    Examples:
        >>> precision_of("compact", None, None, None) == mt.Precision.compact()
        True
    """
    named = mt.Precision.of(name)
    return mt.Precision(
        master=jnp.dtype(master) if master else named.master,
        state=jnp.dtype(state) if state else named.state,
        frozen=frozen,
        compute=compute or named.compute or without,
        sums=sums,
        products={"*": "float8"} if products == "float8-all" else products,
    )


def schedule_of(
    learning_rate: float, steps: int, warmup: float, decay: Decay, final: float
) -> optax.Schedule:
    """The learning rate over the steps of a run: linear warm-up, then a decay to the last step.

    With n warm-up steps, the first step has 1 / (n + 1) of the highest rate, because a step with
    rate 0 would learn nothing.

    Args:
        learning_rate: The highest rate.
        steps: Number of steps.
        warmup: Fraction of steps in which the rate rises, rounded up to whole steps.
        decay: How it falls afterwards.
        final: Fraction of the highest rate at the last step; ignored by a constant schedule.

    Raises:
        ValueError: If the first step's rate is 0 in float32.

    Examples:
        >>> rates = schedule_of(1.0, 10, 0.2, "linear", 0.0)
        >>> [round(float(rates(step)), 2) for step in (0, 1, 2, 6, 10)]
        [0.33, 0.67, 1.0, 0.5, 0.0]
    """
    rising = math.ceil(warmup * steps)
    # Optax refuses a decay over no steps, which occurs if a run is all warm-up.
    falling = max(1, steps - rising)
    after = {
        "cosine": optax.cosine_decay_schedule(learning_rate, falling, alpha=final),
        "linear": optax.linear_schedule(learning_rate, final * learning_rate, falling),
        "constant": optax.constant_schedule(learning_rate),
    }[decay]
    schedule = after
    if rising:
        first = learning_rate / (rising + 1)
        warming = optax.linear_schedule(first, learning_rate, rising)
        schedule = optax.join_schedules([warming, after], [rising])
    if not np.asarray(schedule(0), np.float32) > 0:
        raise ValueError(
            f"`learning_rate`={learning_rate} is 0 in float32 at the first step, which would learn "
            "nothing: set a higher one"
        )
    return schedule
