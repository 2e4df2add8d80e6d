"""Primitives of kernels: mapped over an axis, they compute its elements one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.common.kernel_primitives import KernelCosts, define

COSTS = KernelCosts(purpose="test", flops=lambda eqn: 0)


def product(x: Any, y: Any) -> Any:
    return x @ y


def sum_and_product(x: Any, y: Any) -> Any:
    return [x + y, x @ y]


@pytest.mark.parametrize("compute", [product, sum_and_product])
def test_a_mapped_kernel_computes_each_element(compute: Any):
    def shapes(x: Any, y: Any) -> Any:
        return [x, x] if several else x

    several = compute is sum_and_product
    name = f"{compute.__name__}_of_test"
    kernel = define(name, shapes, compute, compute, COSTS, several=several)
    x, y = np.random.default_rng(0).normal(size=(2, 3, 5, 3)).astype(np.float32)
    mapped = jax.jit(jax.vmap(kernel.bind, in_axes=(1, None)))(x, y[:, 0])
    expected = [jax.tree.map(np.asarray, compute(x[:, i], y[:, 0])) for i in range(5)]
    jax.tree.map(
        lambda found, *rows: np.testing.assert_allclose(found, jnp.stack(rows), rtol=1e-5),
        mapped,
        *expected,
    )
