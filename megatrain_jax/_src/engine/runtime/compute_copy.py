"""Copies a run's parameters to the devices in the compute dtype, a few at a time.

Between steps, a run holds nothing on the devices, so another program, such as text generation, can
compute there with the current parameters. It reads them from the masters in host memory, as many at
a time as fit on the devices. No second copy is made in host memory.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.program.layers.sliced_values import selector
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.layout import Layout
from megatrain_jax._src.engine.state.placement import Placement


@dataclass(frozen=True, kw_only=True)
class UnreadParameter:
    """A parameter of a `ComputeCopy` that has not been read.

    Attributes:
        number: Its number among the model's parameters.
        shape: Its shape.
        dtype: Its dtype when it is read.
    """

    number: int
    shape: tuple[int, ...]
    dtype: Any


class ComputeCopy:
    """The parameters of a run between steps, to be copied to its devices.

    It is valid until the next training step.

    Attributes:
        model: The user's kind of model, with an `UnreadParameter` in place of each parameter.
        dtype: The dtype of parameters that are read.
        device: The first of the run's devices in this process. A parameter that is read is on it:
            alone if several processes share the run, and otherwise replicated on all devices.
    """

    def __init__(self, spec: RunSpec, store: Store):
        """Reads nothing yet.

        Args:
            spec: The run.
            store: Its arrays, at rest.
        """
        self._spec, self._store = spec, store
        self.dtype = jnp.dtype(spec.precision.compute)
        self.device = store.placement.local_devices[0]
        unread = [
            UnreadParameter(number=number, shape=shape.shape, dtype=self.dtype)
            for number, shape in enumerate(spec.adapted.shapes)
        ]
        self.model = spec.adapted.rebuild(unread, store.on_host(store.variables))
        # The leaves of each parameter: index within it, number of the group, position in the group.
        self._leaves: list[list[tuple[Any, int, int]]] = [[] for _ in unread]
        for group, rows in enumerate(spec.grouping.leaves):
            for place, i in enumerate(rows):
                leaf = spec.leaves[i]
                self._leaves[leaf.parameter].append((leaf.index, group, place))

    def read(self, parameters: Sequence[UnreadParameter]) -> list[jax.Array]:
        """Parameters on the devices, in the dtype of the computation.

        Parameters of one block should be read together, because they are copied together. The
        arrays may still be in flight; each call makes new ones. All processes have to read the same
        parameters in the same order.

        Args:
            parameters: Parameters of `model`.
        """
        wanted: dict[int, list[int]] = {}
        for parameter in parameters:
            for _, group, place in self._leaves[parameter.number]:
                wanted.setdefault(group, []).append(place)
        found: dict[tuple[int, int], jax.Array] = {}
        with self._store.placement.outside_meshes():
            for group, places in wanted.items():
                arrays = self._group(group, tuple(places))
                found |= {(group, place): x for place, x in zip(places, arrays, strict=True)}
        return [self._joined(parameter, found) for parameter in parameters]

    def bytes_at_rest(self, parameters: Sequence[UnreadParameter]) -> int:
        """Bytes of masters in host memory that are copied when parameters are read together."""
        groups = {group for p in parameters for _, group, _ in self._leaves[p.number]}
        return sum(self._store.layouts[group].master.num_bytes for group in groups)

    def _group(self, group: int, places: tuple[int, ...]) -> list[jax.Array]:
        placement, layout = self._store.placement, self._store.layouts[group].master
        arrays = self._store.on_devices(Key(Kind.MASTERS, group))
        found = _unpacking(layout, places, str(self.dtype), placement)(arrays)
        # With other processes' devices, an array could only be used by all processes together.
        alone = placement.num_processes == 1
        return found if alone else [x.addressable_data(0) for x in found]

    def _joined(
        self, parameter: UnreadParameter, found: dict[tuple[int, int], jax.Array]
    ) -> jax.Array:
        """The parameter, joined from its slices if it is stacked over layers."""
        (index, group, place), *others = self._leaves[parameter.number]
        if not others and not index:
            return found[group, place]
        whole = jnp.zeros(parameter.shape, parameter.dtype)
        for index, group, place in self._leaves[parameter.number]:
            whole = whole.at[selector(index)].set(found[group, place])
        return whole


@functools.lru_cache(maxsize=256)
def _unpacking(
    layout: Layout, places: tuple[int, ...], dtype: str, placement: Placement
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """The compiled function from a group's slabs to some of its leaves; equal blocks share it."""
    return jax.jit(lambda arrays: layout.unpack_whole(arrays, places, dtype, placement.whole))
