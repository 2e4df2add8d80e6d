"""The kernels of a run's initial state: a group's masters, and its optimizer state."""

from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.optimizer.slicing import Fragment
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.layout import Layout
from megatrain_jax._src.state.placement import Placement


def pack(layout: Layout, placement: Placement) -> Kernel:
    """The kernel `leaves -> masters` of one group: arrays at rest."""

    # Without a draw, initial numbers are rounded to nearest: nothing has been added up yet that
    # could be lost on the way.
    def pack(leaves):
        return layout.encode(layout.pack(leaves))

    gives = placement.slabs_on_device
    return Kernel(name="pack", key=layout, build=lambda: pack, gives=gives)


def initial_state(fragment: Fragment, layout: GroupLayout, placement: Placement) -> Kernel:
    """The kernel `masters -> state` of one group, both as arrays at rest."""

    # Made of masters as they are at rest, rounded or not, as every update starts from these.
    def init_group(masters):
        slab = layout.master.decode(masters)
        params = [layout.master.unpack(slab, i) for i in range(len(layout.master.shapes))]
        state = jx.evaluate(fragment.jaxpr, [*fragment.consts, *params])
        return layout.state.encode(layout.state.pack(state))

    return Kernel(
        name="initial",
        key=(fragment.key, layout),
        build=lambda: init_group,
        gives=placement.slabs_on_device,
    )
