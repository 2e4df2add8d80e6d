"""The kernels of a run's initial state: a group's masters, its optimizer state, its scalars."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.kernel import Kernel, placed
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.slicing import Fragment
from megatrain_jax._src.engine.state.groups import GroupLayout
from megatrain_jax._src.engine.state.layout import Layout
from megatrain_jax._src.engine.state.placement import Placement


def pack(layout: Layout, dtypes: Sequence[Any], placement: Placement) -> Kernel:
    """The kernel `leaves -> masters` of one group: arrays at rest.

    Args:
        layout: The layout of the group's masters.
        dtypes: The dtype of each leaf before it is packed.
        placement: Placement of the run.
    """

    # Without random bits, initial numbers are rounded to nearest. Stochastic rounding preserves
    # sums of small updates, and nothing has been added up yet.
    def pack(leaves):
        return layout.encode(layout.pack(leaves))

    rows = zip(layout.shapes, dtypes, strict=True)
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in rows]
    return Kernel(
        name="pack",
        key=layout,
        build=lambda: pack,
        takes=(placed(leaves, placement.small_on_device),),
        out_shardings=placement.slabs_on_device,
    )


def initial_state(fragment: Fragment, layout: GroupLayout, placement: Placement) -> Kernel:
    """The kernel `masters -> state` of one group, both as arrays at rest."""

    def init_group(masters):
        slab = layout.state.pack(_of_masters(fragment, layout, masters))
        return layout.state.encode(jax.tree.map(_hidden, slab))

    return Kernel(
        name="initial",
        key=(fragment.key, layout),
        build=lambda: init_group,
        takes=(_masters(layout, placement),),
        out_shardings=placement.slabs_on_device,
    )


def initial_scalars(fragment: Fragment, layout: GroupLayout, placement: Placement) -> Kernel:
    """The kernel `masters -> scalars` of one group, for the state that all groups share."""
    return Kernel(
        name="initial scalars",
        key=(fragment.key, layout),
        build=lambda: lambda masters: _of_masters(fragment, layout, masters),
        takes=(_masters(layout, placement),),
        out_shardings=placement.small_on_device,
    )


def _masters(layout: GroupLayout, placement: Placement) -> Any:
    """The shapes of a group's masters, as `pack` gives them."""
    return placed(layout.master.at_rest, placement.slabs_on_device)


def _hidden(x: jax.Array) -> jax.Array:
    """Returns an array with a value that XLA doesn't know when it compiles.

    Most initial state is zero. XLA would encode the zeros while it compiles, slowly, and keep the
    codes in the program.
    """
    return jnp.where(jax.lax.optimization_barrier(True), x, jnp.ones_like(x))


def _of_masters(fragment: Fragment, layout: GroupLayout, masters: Any) -> list[jax.Array]:
    """The results of a fragment on a group's parameters, from its masters at rest."""
    # Decoded from the stored masters, rounded or not, because every update starts from these.
    own = layout.master
    segments = own.decode_segments(masters)
    params = [own.unpack_from(segments, i).astype(own.dtype) for i in range(len(own.shapes))]
    return jx.evaluate(fragment.jaxpr, [*fragment.consts, *params])
