"""The kernels of initial state: masters, optimizer state, and zeros to add gradients to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.optimizer.slicing import Fragment
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.layout import Layout


def pack(layout: Layout) -> Kernel:
    """The kernel `leaves -> masters` of one group: arrays at rest."""

    def pack(leaves):
        return layout.encode(layout.pack(leaves))

    return Kernel(name="pack", key=layout, build=lambda: pack)


def initial_state(fragment: Fragment, layout: GroupLayout) -> Kernel:
    """The kernel `masters -> state` of one group, both as arrays at rest."""

    def init_group(masters):
        slab = layout.master.decode(masters)
        params = [layout.master.unpack(slab, i) for i in range(len(layout.master.shapes))]
        state = jx.evaluate(fragment.jaxpr, [*fragment.consts, *params])
        return layout.state.encode(layout.state.pack(state))

    return Kernel(name="initial", key=(fragment.key, layout), build=lambda: init_group)


def zeros(layout: Layout, sharding: jax.sharding.Sharding) -> Kernel:
    """The kernel `() -> gradient` of one group's masters: fp32 zeros, to be added to.

    Args:
        layout: Layout of the masters.
        sharding: Sharding of the gradient.
    """
    size = layout.size

    def build() -> Callable:
        return lambda: jnp.zeros(size, jnp.float32)

    return Kernel(name="zeros", key=size, build=build, sharding=sharding)
