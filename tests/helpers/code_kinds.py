"""Kinds of codes, and the numbers that they are tried with."""

import itertools

import numpy as np

from megatrain_jax._src.engine.state.codec import Blockwise

KINDS = list(itertools.product(("dynamic", "linear"), (8, 4), (True, False)))


BLOCK = Blockwise.block


def numbers(seed, signed, blocks=6):
    """Numbers over many magnitudes, each block with a scale of its own."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(blocks, BLOCK)) ** 3 * 10.0 ** rng.uniform(-3, 0, (blocks, BLOCK))
    x *= 10.0 ** rng.integers(-20, 20, (blocks, 1))
    x = x.astype(np.float32).reshape(-1)
    return x if signed else np.abs(x)
