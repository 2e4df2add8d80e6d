"""The kernels of the extra `kernels`, on an H100 or H200, against the operations they replace.

Kernels add in fp32, but read and write bfloat16, and rounding a number to bfloat16 changes it by
0.0017 (root mean square). A result that several such roundings reach is wrong by 0.005: the plain
operations in bfloat16, which a CPU computes too, differ from fp32 by 0.0057 in the worst array of
the experts, and kernels of the delta rule by 0.0041. So each array may differ by 0.01 of its norm.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.lm.models import kernel_checks
from megatrain_jax._src.lm.models.delta_rule import delta_rule_and_state
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.families.mixtures import _clamped
from megatrain_jax._src.lm.models.linear_attention import gated_delta_rule
from megatrain_jax._src.lm.models.moe import gated

# The kernels' library may warn of anything; the fixture looks for the warning that matters.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def normal(seed, *shape, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def compared(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


@pytest.fixture(autouse=True)
def checked():
    """The kernels are there and pass the library's own check, without a warning."""
    pytest.importorskip("jla")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The kernels for")
        assert kernel_checks.has_grouped_products() and kernel_checks.has_delta_rule()


@pytest.mark.parametrize(
    ("kind", "tokens"), [("gated", 64), ("biases, sizes and rows to be padded", 1001)]
)
def test_experts_by_kernels_are_those_of_the_loop_in_fp32(kind, tokens):
    num, per_token, width, inside = 8, 3, 256, 384
    if kind == "gated":
        shapes = (num, inside, width), (num, inside, width), (num, width, inside)
        weights = tuple(normal(i, *s, scale=0.05) for i, s in enumerate(shapes))
        expert = gated(jax.nn.silu)
    else:
        width, inside = 248, 380
        shapes = (num, width, 2 * inside), (num, 2 * inside), (num, inside, width), (num, width)
        weights = tuple(normal(i, *s, scale=0.05) for i, s in enumerate(shapes))
        expert = _clamped(1.7, 7.0)
    x, logits = normal(7, tokens, width), jax.random.normal(jax.random.key(8), (tokens, num))
    logits = logits.at[:, 2].set(-100.0)  # an expert without rows

    def gradients(x, logits, weights):
        def total(x, logits, weights):
            shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), per_token)
            mixed = mix(x, chosen, shares, weights, expert)
            return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

        # The sum is not compared: its terms cancel, so it is as wrong as all of them together.
        lowered = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True)).lower(x, logits, weights)
        return lowered.compile()(x, logits, weights), lowered.as_text()

    found, text = gradients(x, logits, weights)
    assert "mosaic_gpu" in text
    with jax.default_matmul_precision("highest"):
        expected, text = gradients(wide(x), logits, wide(weights))
    assert "mosaic_gpu" not in text
    compared(found, expected)


# Lowering and compiling take 20 seconds a case.
@pytest.mark.parametrize(("width", "documents"), [(64, True), (128, False)])
def test_the_delta_rule_by_kernels_is_that_by_chunks_in_fp32(width, documents):
    q, k, v = (normal(i, 2, 1000, heads, width) for i, heads in enumerate((2, 2, 4)))
    rate = jax.nn.sigmoid(normal(3, 2, 1000, 4))
    log_decay = -jnp.abs(normal(4, 2, 1000, 4).astype(jnp.float32))
    segments = (
        jnp.arange(1000)[None].repeat(2, 0) // jnp.array([[300], [77]]) if documents else None
    )

    def gradients(rule, *operands):
        def total(*operands: Any) -> Any:
            values = rule(*operands)
            return jnp.sum(jnp.sin(values.astype(jnp.float32))), values

        return jax.jit(jax.grad(total, range(5), has_aux=True))(*operands)

    operands = q, k, v, log_decay, rate
    found = gradients(functools.partial(gated_delta_rule, segments=segments), *operands)
    with jax.default_matmul_precision("highest"):
        in_chunks = functools.partial(delta_rule_and_state, segments=segments)
        expected = gradients(lambda *args: in_chunks(*args)[0], *wide(operands))
    compared(found, expected)
