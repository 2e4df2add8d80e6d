"""The placement of a run's arrays: its devices, and how each kind of array is laid over them.

A `Placement` is made once, where a run begins, and passed down to whoever makes or moves an array.
Nothing else asks JAX which devices there are.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of a run and the sharding of each kind of array.

    Slabs are flat; with them travel, along the same shardings, activations, whose first axis is of
    examples. Small arrays are the same on every device: variables, scalars, keys, and the leaves
    that a slab is made of before they are packed.

    Attributes:
        devices: The devices.
        platform: JAX's name of their platform: "cpu", "gpu", ...
        slabs_at_rest: Sharding of slabs in pinned host memory.
        slabs_on_device: Sharding of slabs in the devices' own memory.
        batches: Sharding of batches on the devices.
        small_at_rest: Sharding of small arrays in pinned host memory.
        small_on_device: Sharding of small arrays in the devices' own memory.
    """

    devices: tuple[Any, ...]
    platform: str
    slabs_at_rest: Sharding
    slabs_on_device: Sharding
    batches: Sharding
    small_at_rest: Sharding
    small_on_device: Sharding


def default_device() -> Any:
    """JAX's first device, which runs use; starts JAX's backend."""
    return jax.devices()[0]


def on_one_device(device: Any) -> Placement:
    """The placement of a run on one device, where every array is whole."""
    at_rest = SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = SingleDeviceSharding(device, memory_kind="device")
    return Placement(
        devices=(device,),
        platform=device.platform,
        slabs_at_rest=at_rest,
        slabs_on_device=on_device,
        batches=on_device,
        small_at_rest=at_rest,
        small_on_device=on_device,
    )
