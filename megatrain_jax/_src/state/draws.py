"""Random bits for rounding: a hash of the element's number, keyed by run, step, group and slab.

A counter-based generator has no state to keep or to fetch: the same update draws the same bits
however it is scheduled, and after a resume. This one is a few integer operations an element, which
a compiler computes where the bits are used, so that no array of them exists.

A worked example, the draws of an update of group 3 by the gradient of step 7::

    draw = draw_of(key, 7, 3)
    masters, state = part_of(draw, 0), part_of(draw, 1)
    part_of(state, s)       # of the state's slab number s
    part_of(masters, n)     # of segment n, where a slab has segments of several codecs
    random_bits(masters, numbers)    # an integer for each element, by its number in its segment
"""

import jax
import jax.numpy as jnp

Draw = tuple[jax.Array, jax.Array]
"""Two 32-bit words that bits are drawn from."""


def draw_of(key: jax.Array, step: jax.Array, group: jax.Array) -> Draw:
    """The draw of one group's update.

    Args:
        key: The run's random key.
        step: Number of the step that the gradient is of.
        group: Number of the group.
    """
    words = jax.random.key_data(key).reshape(-1)
    # The halves of SplitMix64's constant, 2^64 over the golden ratio: no more than a start with
    # bits of both kinds.
    draw = jnp.uint32(0x9E3779B9), jnp.uint32(0x7F4A7C15)
    for word in (*(words[i] for i in range(words.size)), step, group):
        draw = _folded(draw, word.astype(jnp.uint32))
    return draw


def part_of(draw: Draw, number: int | jax.Array) -> Draw:
    """One of the independent draws that a draw consists of, by number."""
    return _folded(draw, jnp.uint32(number))


def random_bits(draw: Draw, numbers: jax.Array) -> jax.Array:
    """Uniform 32-bit integers for elements with these numbers, uint32; of their shape."""
    # With one word alone, draws whose words differ in the lower bits would have the same bits, only
    # for other elements.
    first, second = draw
    return _mixed(_mixed(numbers ^ first) ^ second)


def _folded(draw: Draw, word: jax.Array) -> Draw:
    first = _mixed(draw[0] ^ word)
    return first, _mixed(draw[1] + first)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit integers in which each bit depends on all (lowbias32, C. Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
