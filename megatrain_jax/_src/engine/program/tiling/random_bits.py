"""Random bits for part of an array, equal to the bits drawn for the whole array.

JAX's partitionable Threefry computes an element's bits from its 64-bit index in the array alone:
`threefry2x32(key, high and low half of the index)`.

Example: bits of shape (4, 6) in 2 tiles along axis 0, hence of shape (2, 6): the elements of tile 1
have the indices 12 to 23 in the whole array, and get the bits of these.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as jex_random

from megatrain_jax._src.engine.program.axes import Label


def tile_of_bits(eqn: Any, label: Label, tile: Any, num_tiles: int, key: Any) -> Any:
    """One tile of the result of a `random_bits` equation.

    Args:
        eqn: The equation.
        label: Label of its result.
        tile: Number of the tile.
        num_tiles: Number of tiles.
        key: The key, of the implementation `threefry2x32`.
    """
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    high, low = _numbers(label.split(shape, num_tiles), label.axis + 1, tile)
    first, second = (lax.broadcast(x, low.shape) for x in jax.random.key_data(key))
    own = (*shape[: label.axis], label.outer * label.inner, *shape[label.axis + 1 :])
    bits = jex_random.threefry2x32_p.bind(first, second, high, low)
    high, low = (x.reshape(own) for x in bits)
    if width == 64:
        wide = [lax.convert_element_type(x, jnp.uint64) for x in (high, low)]
        return lax.shift_left(wide[0], jnp.uint64(32)) | wide[1]
    # As in JAX, both words of an element make its 32 bits, or fewer.
    return lax.convert_element_type(high ^ low, jnp.dtype(f"uint{width}"))


def _numbers(shape: Sequence[int], axis: int, at: Any) -> tuple[Any, Any]:
    """The indices of an array's elements at one place along an axis.

    Returns:
        The upper and lower 32 bits of each index, with the shape without that axis.
    """
    own = (*shape[:axis], *shape[axis + 1 :])
    high, low = (jnp.zeros(own, jnp.uint32) for _ in range(2))
    for d, size in enumerate(shape):
        if d == axis:
            entry = lax.convert_element_type(at, jnp.uint32)
        else:
            entry = lax.broadcasted_iota(jnp.uint32, own, d - (d > axis))
        carried, low = _wide_product(low, size)
        low = low + entry
        # Horner's rule in a mixed base; a sum smaller than its term has wrapped around.
        high = high * jnp.uint32(size) + carried + (low < entry).astype(jnp.uint32)
    return high, low


def _wide_product(x: Any, factor: int) -> tuple[Any, Any]:
    """The upper and lower 32 bits of the product of 32-bit numbers and a factor below 2**32."""
    # In halves of 16 bits, so that no product or sum here exceeds 32 bits: the device has no wider
    # integers unless JAX is told to use them.
    half, sixteen = jnp.uint32(0xFFFF), jnp.uint32(16)
    x0, x1 = x & half, x >> sixteen
    f0, f1 = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    middle = x1 * f0 + (x0 * f0 >> sixteen)
    carry = x0 * f1 + (middle & half)
    high = x1 * f1 + (middle >> sixteen) + (carry >> sixteen)
    return high, x * jnp.uint32(factor)
