"""Random bits for rounding: a hash of the element's number, keyed by run, step, group and slab.

A counter-based generator has no state to store or fetch: the same update draws the same bits under
any schedule, and after a resume. This generator takes a few integer operations per element. The
compiler fuses them into the code that uses the bits, so that no array of bits exists.

Example: the draws of an update of group 3 by the gradient of step 7::

    draw = draw_of(key, 7, 3)
    masters, state = part_of(draw, 0), part_of(draw, 1)
    part_of(state, s)       # for slab number s of the state
    part_of(masters, n)     # for segment n, if a slab has segments with several codecs
    random_bits(masters, numbers)    # one integer per element, by its number in its segment
"""

import jax
import jax.numpy as jnp

Draw = tuple[jax.Array, jax.Array]
"""Two 32-bit words that seed random bits."""


def draw_of(key: jax.Array, step: jax.Array, group: jax.Array) -> Draw:
    """The draw of one group's update.

    Args:
        key: The run's random key.
        step: Number of the gradient's step.
        group: Number of the group.
    """
    words = jax.random.key_data(key).reshape(-1)
    # The halves of SplitMix64's constant, 2^64 over the golden ratio. Any start value with both
    # ones and zeros would do.
    draw = jnp.uint32(0x9E3779B9), jnp.uint32(0x7F4A7C15)
    for word in (*(words[i] for i in range(words.size)), step, group):
        draw = _folded(draw, word.astype(jnp.uint32))
    return draw


def derived_draw(draw: Draw, number: int | jax.Array) -> Draw:
    """An independent draw, derived from a draw and a number."""
    return _folded(draw, jnp.uint32(number))


def random_bits(draw: Draw, numbers: jax.Array) -> jax.Array:
    """Uniform uint32 integers for elements with these numbers, in the same shape."""
    # With a single word, two draws that differ in their lower bits would have the same random bits
    # in a different order of elements.
    first, second = draw
    return _mixed(_mixed(numbers ^ first) ^ second)


def halves_of_bits(draw: Draw, numbers: jax.Array, count: int) -> list[jax.Array]:
    """Uniform uint32 integers for `count` arrays of such elements, at a third of the operations.

    Only the upper 16 bits of each integer are random, and the integers of different arrays are
    uncorrelated, but not independent.
    """
    first, second = draw
    # Different draws give different sequences, not one sequence in different orders of elements.
    word = _mixed(numbers * (first | 1) + second)
    odd = (0x9E3779B1 + 0x3C6EF372 * n for n in range(count))  # golden ratio, and twice that
    found = [word, word << 16, *(word * jnp.uint32(x & 0xFFFFFFFF | 1) for x in odd)]
    return found[:count]


def _folded(draw: Draw, word: jax.Array) -> Draw:
    first = _mixed(draw[0] ^ word)
    return first, _mixed(draw[1] + first)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit integers that mixes all bits (lowbias32, C. Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
