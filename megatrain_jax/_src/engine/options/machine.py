"""Checks of the options for hardware and mesh."""

from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.state.hardware import Hardware, card


def found_hardware(value: Any) -> Hardware | None:
    """Returns the argument `hardware` as a record, also if it is the name of a known card.

    Raises:
        TypeError: If it is neither.
        ValueError: If no card of that name is known.
    """
    if value is None or isinstance(value, Hardware):
        return value
    if not isinstance(value, str):
        allowed = 'a megatrain_jax.Hardware, the name of a card such as "H100", or None'
        raise TypeError(refused("hardware", allowed, value, "see megatrain_jax.this_machine()"))
    try:
        return card(value)
    except ValueError as error:
        raise ValueError(f"`hardware`={value!r}: {error}") from None


def check_products(precision: Precision, machine: Hardware | None) -> None:
    """Checks that an accelerator supports the matrix products of a precision; a CPU supports all.

    Raises:
        ValueError: If it has no units for float8.
    """
    if not precision.asks_for_float8 or machine is None or machine.float8_flops_per_s is not None:
        return
    given: Any = precision.products
    given = dict(given) if isinstance(given, tuple) else given
    described = machine.source == "given"  # by the user, perhaps without this rate
    hint = ", or give `float8_flops_per_s` in your Hardware(...)" if described else ""
    raise ValueError(
        f"Precision(products={given!r}) needs a GPU with units for float8, of compute capability "
        f"8.9 or newer, but {machine.name} has none. Leave `products` out{hint}"
    )


def check_mesh_given(value: Any) -> None:
    """Checks the argument `mesh`.

    Raises:
        TypeError: If it is no mesh.
        ValueError: If it has no devices, or one of them twice.
    """
    if value is None:
        return
    if not isinstance(value, Mesh | AbstractMesh):
        listed = isinstance(value, list | tuple | np.ndarray)
        given = np.size(value) if listed else value if type(value) is int else 0
        raise TypeError(refused("mesh", "a jax.sharding.Mesh or None", value, mesh_of(given)))
    if not value.size:
        raise ValueError(f"`mesh` has no devices: {value}; {mesh_of(0)}, or None for all GPUs")
    if isinstance(value, Mesh) and (different := len(set(value.devices.flat))) < value.size:
        raise ValueError(
            f"`mesh` has {value.size} places for {different} devices, each of which may be there "
            f"only once; {mesh_of(different)}"
        )


def mesh_of(num_devices: int) -> str:
    """Advice on how to write a mesh of this many devices, or of n if the number is less than 1."""
    return f'write mesh=jax.make_mesh(({num_devices if num_devices > 0 else "n"},), ("data",))'
