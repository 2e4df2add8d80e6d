"""The placement of a run's arrays: its devices, and how each kind of array is laid over them.

A `Placement` is made once, where a run begins, and passed down to whoever makes or moves an array.
Nothing else asks JAX which devices there are.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from megatrain_jax._src.state.processes import Processes

_AXIS = "data"
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
_NO_LIMIT = str(2**40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of a run and the sharding of each kind of array.

    Slabs are flat and divided evenly; along the same shardings travel batches, and activations
    whose first axis is of examples. Small arrays are the same on every device: variables, scalars,
    keys, and the leaves that a slab is made of before they are packed.

    Attributes:
        devices: The devices; none in a plan.
        num_devices: Number of devices.
        platform: JAX's name of their platform: "cpu", "gpu", ...; "" in a plan.
        processes: The processes that own them.
        slabs_at_rest: Sharding of slabs in pinned host memory.
        slabs_on_device: Sharding of slabs in the devices' own memory.
        small_at_rest: Sharding of small arrays in pinned host memory.
        small_on_device: Sharding of small arrays in the devices' own memory.
    """

    devices: tuple[Any, ...]
    num_devices: int
    platform: str
    processes: Processes
    slabs_at_rest: Sharding
    slabs_on_device: Sharding
    small_at_rest: Sharding
    small_on_device: Sharding

    @property
    def local_devices(self) -> tuple[Any, ...]:
        """The devices that this process computes on; none in a plan."""
        here = jax.process_index() if self.devices else None
        return tuple(device for device in self.devices if device.process_index == here)

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options of XLA's for kernels that compute here.

        XLA joins collectives of one kind up to a size of its own choice; a kernel's gradients, each
        of which is summed over the devices where it is made, are to travel together.
        """
        if self.platform != "gpu" or self.num_devices == 1:
            return {}
        return {f"xla_gpu_{kind}_combine_threshold_bytes": _NO_LIMIT for kind in _COLLECTIVES}

    @contextmanager
    def outside_meshes(self) -> Iterator[None]:
        """Leaves a mesh that the caller has set (`jax.set_mesh`) for the body.

        JAX counts the mesh around a call among what a function is compiled for, and a run's
        functions are compiled without one. A mesh of one device stays around a run on one device,
        whose loss may compute in it.
        """
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty or ambient.size == self.num_devices == 1:
            yield
            return
        # One without axes, as there is outside of all meshes.
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            yield

    def values(self, batched: bool) -> Sharding:
        """The sharding of an activation, divided along its first axis if that is of examples."""
        return self.slabs_on_device if batched else self.small_on_device

    def batch(self, num_examples: int) -> Sharding:
        """The sharding of a batch; one that doesn't divide is whole on every device."""
        return self.values(num_examples % self.num_devices == 0)

    def put(self, tree: Any, sharding: Sharding) -> Any:
        """Puts values that all processes have, or arrays of this run, in one of these shardings.

        Random keys of several processes stay on the devices.
        """
        if self.processes.count == 1:
            return jax.device_put(tree, sharding)
        with jax.transfer_guard("allow"):  # as `device_put` is, where it can be used
            return jax.tree.map(lambda x: self._put_one(x, sharding), tree)

    def move(self, arrays: Sequence[jax.Array], sharding: Sharding) -> list[jax.Array]:
        """Copies of arrays in the same shards, in the memory of another of these shardings.

        Of several processes each moves its own shards: given whole arrays, `device_put` would have
        the devices compute an identity (JAX 0.11.2), and no copy would pass beside a computation.
        """
        if self.processes.count == 1:
            return jax.device_put(arrays, sharding)
        kind = sharding.memory_kind
        # One call for all shards of all arrays, as a call takes far longer than an array in it.
        shards = [shard.data for x in arrays for shard in x.addressable_shards]
        targets = [_on_one(x.device, kind) for x in shards]
        copies = iter(jax.device_put(shards, targets))
        return [
            jax.make_array_from_single_device_arrays(
                x.shape, sharding, list(islice(copies, len(self.local_devices)))
            )
            for x in arrays
        ]

    @property
    def shards_here(self) -> tuple[int, ...]:
        """The numbers of the shards that this process's devices have of a slab."""
        if not self.devices:
            return (0,)
        return tuple(self.devices.index(device) for device in self.local_devices)

    def put_shards(
        self, arrays: Sequence[Mapping[int, np.ndarray]], sharding: Sharding
    ) -> list[jax.Array]:
        """Flat arrays, of which each process gives the shards of its devices, by their numbers."""
        if self.num_devices == 1:
            return jax.device_put([shards[0] for shards in arrays], sharding)
        numbers, kind = self.shards_here, sharding.memory_kind
        targets = [_on_one(device, kind) for device in self.local_devices] * len(arrays)
        rows = [shards[n] for shards in arrays for n in numbers]
        copies = iter(jax.device_put(rows, targets))
        return [
            jax.make_array_from_single_device_arrays(
                (self.num_devices * shards[numbers[0]].size,),
                sharding,
                list(islice(copies, len(numbers))),
            )
            for shards in arrays
        ]

    def put_parts(self, part: np.ndarray, sharding: Sharding) -> jax.Array:
        """The array whose parts, one a process in their order, lie end to end along its first axis.

        Args:
            part: This process's part; all have one shape.
            sharding: The whole array's sharding.
        """
        # What doesn't divide over the devices is whole on each, so every process needs all parts.
        if sharding.is_fully_replicated:
            return self.put(self.processes.concatenated(np.asarray(part)), sharding)
        shape = (part.shape[0] * self.processes.count, *part.shape[1:])
        with jax.transfer_guard("allow"):
            return jax.make_array_from_process_local_data(sharding, np.asarray(part), shape)

    def readable(self, slab: jax.Array) -> jax.Array | np.ndarray:
        """A slab at rest that this process can read all of: itself, or a copy in several processes.

        All processes have to ask for it. The devices hold all of it meanwhile.
        """
        if self.processes.count == 1:
            return slab
        # Processes can't read each other's memory: devices gather the slab, and each has a copy.
        (on_device,) = self.move([slab], self.slabs_on_device)
        return np.asarray(_identity(self.small_on_device)(on_device))

    def spread(self, x: jax.Array) -> jax.Array:
        """An array divided along its first axis; for use inside jit."""
        return self._constrained(x, self.slabs_on_device)

    def whole(self, x: jax.Array) -> jax.Array:
        """An array whole on every device; for use inside jit."""
        return self._constrained(x, self.small_on_device)

    def _put_one(self, x: Any, sharding: Sharding) -> jax.Array:
        """One array of several processes; see `put`."""
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            # Of this run, in the same shards already: only its memory may change.
            return x if is_key else self.move([x], sharding)[0]
        if is_key:
            wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
            # A key is made of its data by a computation, which gives its results on devices.
            placed = sharding.with_memory_kind("device")
            return jax.jit(wrap, out_shardings=placed)(np.asarray(jax.random.key_data(x)))
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def _constrained(self, x: jax.Array, sharding: Sharding) -> jax.Array:
        return x if self.num_devices == 1 else jax.lax.with_sharding_constraint(x, sharding)


# Cached, so that it is compiled once for a sharding and not for each slab that is read.
@functools.cache
def _identity(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)


@functools.cache
def _on_one(device: Any, memory_kind: str) -> Sharding:
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def on_several(devices: Sequence[Any]) -> str:
    """The devices as progress bars say what they work on: " on 4 GPUs"; nothing for one."""
    return f" on {len(devices)} {devices[0].platform.upper()}s" if len(devices) > 1 else ""


def default_device() -> Any:
    """JAX's first device of this process; starts JAX's backend."""
    return jax.local_devices()[0]


def num_local_devices() -> int:
    """The number of JAX's devices of this process; starts JAX's backend."""
    return len(jax.local_devices())


def default_mesh() -> Mesh:
    """All GPUs that JAX sees, of all processes, or its first device where there is no GPU.

    Several processes share all of their devices, whatever these are. Starts JAX's backend.
    """
    first, *others = jax.devices()
    shared = first.platform == "gpu" or jax.process_count() > 1
    return Mesh([first, *(others if shared else ())], _AXIS)


def placed_on(mesh: Mesh | AbstractMesh) -> Placement:
    """The placement of a run on the devices of a mesh, taken as one row."""
    devices = () if isinstance(mesh, AbstractMesh) else tuple(mesh.devices.flat)
    # Whatever shape the user's mesh has, slabs are divided over all of its devices, as one row; its
    # axis is automatic, as the loss is a function of whole arrays that XLA's partitioner divides.
    if mesh.size > 1:
        automatic = {"axis_types": (AxisType.Auto,)}
        row = (
            Mesh(devices, _AXIS, **automatic)
            if devices
            else AbstractMesh((mesh.size,), (_AXIS,), **automatic)
        )
        divided, whole = (
            functools.partial(NamedSharding, row, spec)
            for spec in (PartitionSpec(_AXIS), PartitionSpec())
        )
    else:  # no mesh of ours, since a loss may enter one of its own
        divided = whole = functools.partial(SingleDeviceSharding, *devices or (default_device(),))
    return Placement(
        devices=devices,
        num_devices=mesh.size,
        platform=devices[0].platform if devices else "",
        processes=_processes_of(devices),
        slabs_at_rest=divided(memory_kind="pinned_host"),
        slabs_on_device=divided(memory_kind="device"),
        small_at_rest=whole(memory_kind="pinned_host"),
        small_on_device=whole(memory_kind="device"),
    )


def _processes_of(devices: Sequence[Any]) -> Processes:
    """The processes that own some devices; this one alone where they are all its own, or none."""
    indices = sorted({device.process_index for device in devices})
    return Processes() if len(indices) < 2 else _all_processes()


@functools.cache
def _all_processes() -> Processes:
    try:
        processors = jax.devices("cpu")
    except RuntimeError as error:
        raise ValueError(
            "several processes need JAX's CPU devices, too, to tell each other where they are: "
            "set JAX_PLATFORMS=cuda,cpu, or leave it unset"
        ) from error
    # The first processor of each process, as the last one to be written stays.
    first = {processor.process_index: processor for processor in reversed(processors)}
    processes = Processes([first[i] for i in sorted(first)])
    processes.find_hosts()
    return processes
