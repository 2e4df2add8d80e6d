"""The placement of a run's arrays: its devices, and the sharding of each kind of array.

A `Placement` is made once, when a run begins, and passed to all code that makes or moves arrays.
Only this file asks JAX for its devices.
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

from megatrain_jax._src.engine.state.coordination import CoordinationService
from megatrain_jax._src.engine.state.processes import Processes

_AXIS, _ACROSS = "data", "processes"
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
_NO_LIMIT = str(2**40)
_PART_BYTES = str(2**30)

PART = "xla_multiheap_size_constraint_per_heap"
"""XLA's option for the largest part of a function's temporaries, in bytes.

Without it, XLA allocates all of them at once. After some steps no gap between other arrays was
large enough for 5.8 GiB on an H100 with 18 GiB free.
"""
LARGEST_PART = 2**31 - 1
"""The largest value of that option, in bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of a run and the sharding of each kind of array.

    Slabs are flat and divided evenly. Batches have the same sharding, and so do activations with
    examples along their first axis. Small arrays are replicated on every device: variables,
    scalars, keys, and leaves before they are packed into a slab.

    Usually all processes share the arrays. Where each holds all state, its arrays are on its own
    devices alone, and `across` joins equal arrays of all processes to larger ones, whose first axis
    has a part per process. Example: two processes with two devices each, and a gradient of 8
    elements::

        process 0         [0 1 2 3 | 4 5 6 7]
        process 1                               [0 1 2 3 | 4 5 6 7]
        joined            [0 1 2 3 | 4 5 6 7  |  0 1 2 3 | 4 5 6 7]

    Attributes:
        devices: The devices that share the arrays; none in a plan.
        num_devices: Number of devices.
        platform: JAX's name of the devices' platform: "cpu", "gpu", ...; "" in a plan.
        processes: The processes of the run.
        across: All their devices, a row per process, if each process holds all state; else None.
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
    across: Mesh | None = None

    @property
    def num_processes(self) -> int:
        """The number of processes that share the arrays."""
        return 1 if self.across else self.processes.count

    @property
    def process_counts(self) -> tuple[int, int]:
        """The number of processes that share the arrays, and the number of these on this host."""
        return (1, 1) if self.across else (self.processes.count, self.processes.num_here)

    @property
    def num_copies(self) -> int:
        """The number of processes that each hold all state; 1 if they share it."""
        return self.processes.count if self.across else 1

    @property
    def copy(self) -> int:
        """The number of this process's copy of the state, from 0, which is the one to be saved."""
        return self.processes.index if self.across and not self.processes.is_alone else 0

    @property
    def local_devices(self) -> tuple[Any, ...]:
        """The devices of this process; none in a plan."""
        here = jax.process_index() if self.devices else None
        return tuple(device for device in self.devices if device.process_index == here)

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA options for kernels on these devices.

        XLA allocates a function's temporaries in parts; see `PART`.

        XLA combines collectives of one kind up to a threshold. A kernel sums each gradient over the
        devices where it is computed; without a threshold, they are combined into one collective.
        """
        if self.platform != "gpu":
            return {}
        options = {PART: _PART_BYTES}
        if self.num_devices > 1:
            options |= {f"xla_gpu_{k}_combine_threshold_bytes": _NO_LIMIT for k in _COLLECTIVES}
        return options

    @contextmanager
    def outside_meshes(self) -> Iterator[None]:
        """Removes the caller's mesh (`jax.set_mesh`) for the body of a `with` statement.

        JAX compiles a function once per ambient mesh, and a run's functions are compiled without
        one. A run on one device keeps a mesh of one device, because its loss may compute in it.
        """
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty or ambient.size == self.num_devices == 1:
            yield
            return
        # A mesh without axes is the default.
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            yield

    def values(self, batched: bool) -> Sharding:
        """The sharding of an activation; `batched` ones are divided along their first axis."""
        return self.slabs_on_device if batched else self.small_on_device

    def batch(self, num_examples: int) -> Sharding:
        """The sharding of a batch; it is replicated if the devices can't divide it evenly."""
        return self.values(num_examples % self.num_devices == 0)

    def put(self, tree: Any, sharding: Sharding) -> Any:
        """Puts values that all processes have, or arrays of this run, in one of these shardings.

        In a run of several processes, random keys stay on the devices.
        """
        if self.num_processes == 1:
            return jax.device_put(tree, sharding)
        with jax.transfer_guard("allow"):  # explicit transfers, like `device_put`
            return jax.tree.map(lambda x: self._put_one(x, sharding), tree)

    def move(self, arrays: Sequence[jax.Array], sharding: Sharding) -> list[jax.Array]:
        """Copies arrays to another kind of memory, with the same shards.

        With several processes, each process moves its own shards. For whole arrays, `device_put`
        would run an identity on the devices (JAX 0.11.2), and copies could not overlap computation.
        """
        if self.num_processes == 1:
            return jax.device_put(arrays, sharding)
        shards = [shard.data for x in arrays for shard in x.addressable_shards]
        devices = [shard.device for shard in shards]
        return self._assembled(shards, devices, [x.shape for x in arrays], sharding)

    @property
    def shards_here(self) -> tuple[int, ...]:
        """The numbers of a slab's shards on this process's devices."""
        if not self.devices:
            return (0,)
        return tuple(self.devices.index(device) for device in self.local_devices)

    def put_shards(
        self, arrays: Sequence[Mapping[int, np.ndarray]], sharding: Sharding
    ) -> list[jax.Array]:
        """Flat arrays made of shards; each process gives its devices' shards by number."""
        if self.num_devices == 1:
            return jax.device_put([shards[0] for shards in arrays], sharding)
        numbers, devices = self.shards_here, [*self.local_devices] * len(arrays)
        rows = [shards[n] for shards in arrays for n in numbers]
        shapes = [(self.num_devices * shards[numbers[0]].size,) for shards in arrays]
        return self._assembled(rows, devices, shapes, sharding)

    def _assembled(self, shards, devices, shapes, sharding: Sharding) -> list[jax.Array]:
        """Arrays of the shards that go to this process's devices, those of one after another."""
        targets = [_on_one(device, sharding.memory_kind) for device in devices]
        # One call for all shards of all arrays, because calls are far slower than arrays in them.
        copies, each = iter(jax.device_put(shards, targets)), len(self.local_devices)
        make = jax.make_array_from_single_device_arrays
        return [make(shape, sharding, list(islice(copies, each))) for shape in shapes]

    def put_parts(self, part: np.ndarray, sharding: Sharding) -> jax.Array:
        """The concatenation of one part per process, in order, along the first axis.

        Args:
            part: This process's part; all parts have the same shape.
            sharding: The sharding of the whole array.
        """
        # A replicated array is whole on each device, so every process needs all parts.
        if sharding.is_fully_replicated:
            return self.put(self._concatenated(np.asarray(part)), sharding)
        shape = (part.shape[0] * self.num_processes, *part.shape[1:])
        with jax.transfer_guard("allow"):
            return jax.make_array_from_process_local_data(sharding, np.asarray(part), shape)

    def _concatenated(self, part: np.ndarray) -> np.ndarray:
        """The processes' arrays, of equal shapes, one after another along their first axis."""
        if self.num_processes == 1:
            return part
        devices = by_process(self.devices, self.num_processes)[:, 0]
        row = Mesh(devices, _AXIS, axis_types=(AxisType.Auto,))
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        with jax.transfer_guard("allow"):
            mine = jax.make_array_from_callback(
                (len(devices), flat.size),
                NamedSharding(row, PartitionSpec(_AXIS)),
                lambda _: flat[None],
            )
            rows = np.asarray(_identity(NamedSharding(row, PartitionSpec()))(mine))
        return rows.view(part.dtype).reshape(-1, *part.shape[1:])

    def part_here(self, x: jax.Array) -> np.ndarray:
        """This process's part of an array with a part per process, in order, on its first axis."""
        count, index = self.num_processes, self.processes.index
        if count == 1:
            return jax.device_get(x)
        if x.is_fully_replicated:
            rows = jax.device_get(x)
            size = len(rows) // count
            return rows[index * size : (index + 1) * size]
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
        return np.concatenate(jax.device_get([shard.data for shard in shards]))

    def readable(self, slab: jax.Array) -> jax.Array | np.ndarray:
        """A slab at rest that this process can read whole: itself, or a copy of all shards.

        Every process has to call this. Meanwhile each device holds the whole slab.
        """
        if self.num_processes == 1:
            return slab
        # Processes can't read each other's memory, so the devices gather the slab.
        (on_device,) = self.move([slab], self.slabs_on_device)
        return np.asarray(_identity(self.small_on_device)(on_device))

    def spread(self, x: jax.Array) -> jax.Array:
        """An array divided along its first axis; for use inside jit."""
        return self._constrained(x, self.slabs_on_device)

    def whole(self, x: jax.Array) -> jax.Array:
        """An array whole on every device; for use inside jit."""
        return self._constrained(x, self.small_on_device)

    def joined(self, arrays: Any) -> Any:
        """Arrays of all processes, made of each process's own; see the class.

        Args:
            arrays: A pytree of arrays on the devices, divided along their first axes or replicated.
        """

        def join(x: jax.Array) -> jax.Array:
            shape = (self.num_copies * x.shape[0], *x.shape[1:])
            return self._of_shards(x, shape, self._joined_sharding(x))

        return jax.tree.map(join, arrays)

    def own(self, arrays: Any) -> Any:
        """This process's copies of arrays that are equal in all, as `over_copies` places them."""

        def part(x: jax.Array) -> jax.Array:
            return self._of_shards(x, x.shape, self.values(not x.is_fully_replicated))

        return jax.tree.map(part, arrays)

    def over_copies(self, divided: bool) -> Sharding:
        """The sharding of an array that is equal in all processes, for results of functions.

        Args:
            divided: Whether it is divided over the devices of each process.
        """
        assert self.across is not None
        return NamedSharding(self.across, PartitionSpec(_AXIS) if divided else PartitionSpec())

    def _joined_sharding(self, x: jax.Array) -> Sharding:
        assert self.across is not None
        axes = _ACROSS if x.is_fully_replicated and self.num_devices > 1 else (_ACROSS, _AXIS)
        return NamedSharding(self.across, PartitionSpec(axes))

    def _of_shards(self, x: jax.Array, shape: Sequence[int], sharding: Sharding) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)

    def _put_one(self, x: Any, sharding: Sharding) -> jax.Array:
        """One array of several processes; see `put`."""
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            # An array of this run already has the same shards; only its memory may change.
            return x if is_key else self.move([x], sharding)[0]
        if is_key:
            wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
            # Wrapping key data is a computation, so its result is on the devices.
            placed = sharding.with_memory_kind("device")
            return jax.jit(wrap, out_shardings=placed)(np.asarray(jax.random.key_data(x)))
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def _constrained(self, x: jax.Array, sharding: Sharding) -> jax.Array:
        return x if self.num_devices == 1 else jax.lax.with_sharding_constraint(x, sharding)


# Cached, so that it is compiled once per sharding and not once per slab.
@functools.cache
def _identity(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)


@functools.cache
def _on_one(device: Any, memory_kind: str) -> Sharding:
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def device_count_text(devices: Sequence[Any]) -> str:
    """The devices in words for progress bars: " on 4 GPUs"; "" for one device."""
    return f" on {len(devices)} {devices[0].platform.upper()}s" if len(devices) > 1 else ""


def default_device() -> Any:
    """JAX's first device of this process; starts JAX's backend."""
    return jax.local_devices()[0]


def num_local_devices() -> int:
    """The number of JAX's devices of this process; starts JAX's backend."""
    return len(jax.local_devices())


def default_mesh() -> Mesh:
    """All GPUs of all processes, or JAX's first device if there is no GPU.

    Several processes share all devices, of any platform. Starts JAX's backend.
    """
    first, *others = jax.devices()
    shared = first.platform == "gpu" or jax.process_count() > 1
    return Mesh([first, *(others if shared else ())], _AXIS)


def placed_on(mesh: Mesh | AbstractMesh, *, per_process: bool = False) -> Placement:
    """The placement of a run on the devices of a mesh, taken as one row.

    Args:
        mesh: The devices; in a plan, their number.
        per_process: Whether each process holds all state on its own devices. The placement is then
            on these devices.
    """
    devices = () if isinstance(mesh, AbstractMesh) else tuple(mesh.devices.flat)
    processes, across = _processes_of(devices), None
    if per_process and processes.count > 1:
        rows = by_process(devices, processes.count)
        across = Mesh(rows, (_ACROSS, _AXIS))
        devices = tuple(rows[processes.index])
        mesh = Mesh(devices, _AXIS)
    # Slabs are divided over all devices of the user's mesh, as one row. Its axis is automatic,
    # because the loss is a function of whole arrays, and XLA's partitioner divides it.
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
    else:  # without a mesh, because the loss may enter its own
        divided = whole = functools.partial(SingleDeviceSharding, *devices or (default_device(),))
    return Placement(
        devices=devices,
        num_devices=mesh.size,
        platform=devices[0].platform if devices else "",
        processes=processes,
        across=across,
        slabs_at_rest=divided(memory_kind="pinned_host"),
        slabs_on_device=divided(memory_kind="device"),
        small_at_rest=whole(memory_kind="pinned_host"),
        small_on_device=whole(memory_kind="device"),
    )


def by_process(devices: Sequence[Any], count: int) -> np.ndarray:
    """The devices of each process, of which each has equally many: a row per process, in order."""
    return np.array(sorted(devices, key=lambda d: d.process_index)).reshape(count, -1)


def _processes_of(devices: Sequence[Any]) -> Processes:
    """The processes that own some devices; a single process if it owns all, or in a plan."""
    indices = sorted({device.process_index for device in devices})
    return Processes() if len(indices) < 2 else _all_processes()


@functools.cache
def _all_processes() -> Processes:
    processes = Processes(jax.process_count(), jax.process_index(), CoordinationService())
    processes.connect()
    return processes
